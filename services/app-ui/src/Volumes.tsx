// Volumes: disks that outlive jobs, who has each, and what may be done with one.
import { Badge, Button, Card, Checkbox, Group, NumberInput, Select, SimpleGrid, Stack, Text, TextInput } from '@mantine/core';
import { useQuery, useQueryClient } from '@tanstack/react-query';
import { useState } from 'react';
import { Link } from 'wouter';
import { Ask } from './Ask';
import { call, ended, type Job, type Location, read, type Volume } from './api';
import { useMe } from './me';
import { Failure, Loading, Page, sentence, StateBadge } from './parts';
import { volumeStates } from './words';

const colors: Record<string, string> = { creating: 'blue', ready: 'green', failed: 'red', lost: 'red', deleting: 'orange' };

/** No disk is plugged into or out of a running machine. */
const changeable = (jobState: string) => ended(jobState) || jobState === 'queued';

function useAgain() {
  const queries = useQueryClient();
  return () => Promise.all(['/volumes', '/jobs'].map((key) => queries.invalidateQueries({ queryKey: [key] })));
}

export function Volumes() {
  const { may } = useMe();
  const [creating, setCreating] = useState(false);
  const volumes = useQuery({ ...read<{ volumes: Volume[] | null }>('/volumes'), refetchInterval: 3000 });
  const list = volumes.data?.volumes ?? [];
  return (
    <Page title="Volumes" actions={may('volumes:write') && <Button onClick={() => setCreating(true)}>Create volume</Button>}>
      <Text c="dimmed">A volume is a disk in one rack that outlives jobs; a job that has it runs there and finds it under /volumes. A stopped job gets it from its next start on.</Text>
      <Failure error={volumes.error} />
      {volumes.isPending && <Loading />}
      {volumes.isSuccess && list.length === 0 && <Text>You have no volumes.</Text>}
      <SimpleGrid cols={{ base: 1, md: 2 }}>{list.map((v) => <VolumeCard key={v.id} volume={v} write={may('volumes:write')} />)}</SimpleGrid>
      <Create opened={creating} onClose={() => setCreating(false)} />
    </Page>
  );
}

function VolumeCard({ volume, write }: { volume: Volume; write: boolean }) {
  const again = useAgain();
  const { projects } = useMe();
  const [asking, ask] = useState<'attach' | 'delete' | { id: string; name: string } | null>(null);
  const close = () => ask(null);
  const attachments = volume.attachments ?? [];
  const entry = volumeStates[volume.state];
  const path = `/api/v1/volumes/${volume.id}`;
  const where = [`${volume.size_gib} GiB on rack ${volume.rack_id}${volume.location ? ` in ${volume.location}` : ''}`, volume.storage_class && `class ${volume.storage_class}`,
    !projects.some((p) => p.id === volume.project_id) && `project ${volume.project_id}`].filter(Boolean).join(', ');
  const detaching = asking !== null && typeof asking === 'object' ? asking : null;
  return (
    <Card withBorder component="section" aria-label={`Volume ${volume.name}`} data-testid={`volume-${volume.name}`}>
      <Group justify="space-between" align="flex-start" mb={4}>
        <Group gap="xs">
          <Text fw={600}>{volume.name}</Text>
          <Badge variant="light" color={colors[volume.state] ?? 'gray'} title={entry?.means}>{entry?.label ?? volume.state}</Badge>
          {volume.shared && <Badge variant="outline" color="gray">shared</Badge>}
        </Group>
        {write && volume.state !== 'deleting' && (
          <Group gap="xs">
            {['creating', 'ready'].includes(volume.state) && <Button size="xs" variant="default" onClick={() => ask('attach')}>Attach…</Button>}
            <Button size="xs" variant="light" color="red" onClick={() => ask('delete')}>Delete…</Button>
          </Group>
        )}
      </Group>
      <Text size="sm" c="dimmed">{where}</Text>
      {volume.message && <Text size="sm" mt={4} style={{ overflowWrap: 'anywhere' }}>{volume.message}</Text>}
      {(volume.state === 'failed' || volume.state === 'lost') && entry && <Text size="sm" mt={4}>{sentence(entry.means)} What helps: {entry.remedy}.</Text>}
      <Stack gap={4} mt="xs">
        {attachments.length === 0 && <Text size="sm">No job has it.</Text>}
        {attachments.map((a) => (
          <Group key={a.job_id} justify="space-between" wrap="nowrap">
            <Group gap={6} style={{ minWidth: 0 }}>
              <Text size="sm" style={{ overflowWrap: 'anywhere' }}><Link href={`/jobs/${a.job_id}`}>{a.job_name}</Link> {a.read_only ? 'reads it' : 'reads and writes it'}</Text>
              <StateBadge state={a.job_state} />
            </Group>
            {write && changeable(a.job_state) && <Button size="compact-xs" variant="subtle" onClick={() => ask({ id: a.job_id, name: a.job_name })} aria-label={`Detach from ${a.job_name}`}>Detach…</Button>}
          </Group>
        ))}
      </Stack>
      <Attach volume={volume} opened={asking === 'attach'} onClose={close} />
      <Ask opened={detaching !== null} onClose={close} title={`Detach ${volume.name} from ${detaching?.name ?? ''}?`} yes="Detach it" danger
        onYes={async () => { await call('POST', `${path}/detach`, { job_id: detaching!.id }); await again(); }}>
        <Text size="sm">From its next start on the job has it no more. What is on the volume stays.</Text>
      </Ask>
      <Ask opened={asking === 'delete'} onClose={close} title={`Delete volume ${volume.name}?`} yes="Delete for good" no="Keep it" danger typed={volume.name}
        onYes={async () => { await call('DELETE', `${path}?${new URLSearchParams({ confirm: volume.name })}`); await again(); }}>
        <Text size="sm">All that is on it ({volume.size_gib} GiB) is removed for good: there is no way back. It is refused while a job has it.</Text>
      </Ask>
    </Card>
  );
}

function Attach({ volume, opened, onClose }: { volume: Volume; opened: boolean; onClose: () => void }) {
  const again = useAgain();
  const jobs = useQuery({ ...read<{ jobs: Job[] | null }>('/jobs'), enabled: opened });
  const [job, setJob] = useState<string | null>(null);
  const [readOnly, setReadOnly] = useState(false);
  const fit = (jobs.data?.jobs ?? []).filter((j) => j.kind === 'gpu_container' && j.project_id === volume.project_id && j.location === volume.location && changeable(j.state));
  const attach = async () => {
    await call('POST', `/api/v1/volumes/${volume.id}/attach`, { job_id: job, read_only: readOnly });
    setJob(null);
    await again();
  };
  return (
    <Ask opened={opened} onClose={onClose} title={`Attach ${volume.name}`} yes="Attach it" incomplete={job === null} onYes={attach}>
      <Select label="Job" description="One that is stopped, or waits for its first start. It has the volume from then on, and runs on its rack." placeholder={jobs.isSuccess && fit.length === 0 ? 'no job there is stopped' : undefined}
        data={fit.map((j) => ({ value: j.id, label: `${j.name} (${j.id})` }))} value={job} onChange={setJob} />
      <Checkbox label="Read only" checked={readOnly} onChange={(e) => setReadOnly(e.currentTarget.checked)} />
    </Ask>
  );
}

function Create({ opened, onClose }: { opened: boolean; onClose: () => void }) {
  const again = useAgain();
  const locations = useQuery({ ...read<{ locations: Location[] | null }>('/locations'), enabled: opened });
  const [name, setName] = useState('');
  const [size, setSize] = useState<number | string>(100);
  const [location, setLocation] = useState<string | null>(null);
  const [storageClass, setStorageClass] = useState('');
  const [shared, setShared] = useState(false);
  const create = async () => {
    await call('POST', '/api/v1/volumes', { name, size_gib: Number(size), location: location ?? '', storage_class: storageClass || undefined, shared });
    setName('');
    await again();
  };
  return (
    <Ask opened={opened} onClose={onClose} title="Create volume" yes="Create" incomplete={name === '' || location === null || size === ''} onYes={create}>
      <TextInput label="Volume name" required description="1 to 20 of a-z, 0-9 and hyphens" value={name} onChange={(e) => setName(e.currentTarget.value)} data-autofocus />
      <NumberInput label="Size (GiB)" required min={1} max={65_536} allowDecimal={false} value={size} onChange={setSize} />
      <Select label="Location" required data={(locations.data?.locations ?? []).map((l) => ({ value: l.code, label: l.code }))} value={location} onChange={setLocation} />
      <TextInput label="Storage class" description="The rack's own when empty" value={storageClass} onChange={(e) => setStorageClass(e.currentTarget.value)} />
      <Checkbox label="Shared" description="Several jobs may read it at once; one that writes has it alone." checked={shared} onChange={(e) => setShared(e.currentTarget.checked)} />
    </Ask>
  );
}
