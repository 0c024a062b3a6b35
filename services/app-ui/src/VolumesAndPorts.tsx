// What a container has beside its own disk: volumes to mount and ports open to the
// outside, in the form of a new job and on a job's page.
import { ActionIcon, Anchor, Button, Card, Checkbox, Code, Group, NumberInput, Select, Stack, Table, Text, TextInput, Title } from '@mantine/core';
import { IconTrash } from '@tabler/icons-react';
import { useQuery } from '@tanstack/react-query';
import { Link } from 'wouter';
import { ended, type Job, type PortAddress, read, type Volume } from './api';
import type { PortRow, VolumeRow } from './jobForm';
import { useMe } from './me';
import { Failure } from './parts';
import { volumeStates } from './words';

type Rule = (...names: string[]) => string | undefined;

const replaced = <T,>(rows: T[], at: number, some: Partial<T>) => rows.map((r, i) => (i === at ? { ...r, ...some } : r));

export function VolumesToMount({ rows, change, location, field }: { rows: VolumeRow[]; change: (rows: VolumeRow[]) => void; location: string | null; field: Rule }) {
  const { projects } = useMe();
  const volumes = useQuery({ ...read<{ volumes: Volume[] | null }>('/volumes'), refetchInterval: 5000 });
  // A new job is one's own project's; another project's volumes are out of its reach.
  const mine = (volumes.data?.volumes ?? []).filter((v) => projects.some((p) => p.id === v.project_id) && v.state !== 'deleting' && (location === null || v.location === location));
  const taken = (v: Volume, at: number) => rows.some((r, i) => i !== at && r.volume === v.name);
  const options = (at: number) => mine.map((v) => ({ value: v.name, label: `${v.name} (${v.size_gib} GiB in ${v.location}, ${volumeStates[v.state]?.label ?? v.state})`, disabled: taken(v, at) }));
  return (
    <Stack gap="xs">
      <Text size="sm" c="dimmed">Disks that outlive the job, mounted under /volumes. The job runs where they are.</Text>
      <Failure error={volumes.error} />
      {volumes.isSuccess && mine.length === 0 && <Text size="sm">You have no volume{location === null ? '' : ` in ${location}`}. <Anchor component={Link} href="/volumes" size="sm">Create one</Anchor></Text>}
      {rows.map((row, i) => (
        <Group key={i} gap="xs" align="flex-end" wrap="nowrap">
          <Select label={`Volume ${i + 1}`} style={{ flex: 1, minWidth: 0 }} data={options(i)} value={row.volume} onChange={(volume) => change(replaced(rows, i, { volume }))} error={field(`volumes[${i}].volume`, `volumes[${i}]`)} />
          <Checkbox label="Read only" aria-label={`Volume ${i + 1}: read only`} mb={8} checked={row.readOnly} onChange={(e) => change(replaced(rows, i, { readOnly: e.currentTarget.checked }))} />
          <ActionIcon variant="subtle" color="red" size="lg" aria-label={`Do not mount volume ${i + 1}`} onClick={() => change(rows.filter((_, at) => at !== i))}><IconTrash size={18} aria-hidden /></ActionIcon>
        </Group>
      ))}
      <Group><Button size="xs" variant="default" disabled={rows.length >= Math.min(8, mine.length)} onClick={() => change([...rows, { volume: null, readOnly: false }])}>Add volume</Button></Group>
    </Stack>
  );
}

export function PortsToOpen({ rows, change, field }: { rows: PortRow[]; change: (rows: PortRow[]) => void; field: Rule }) {
  return (
    <Stack gap="xs">
      <Text size="sm" c="dimmed">Ports of the machine that anybody who reaches the rack can connect to. All others stay closed; shells need none.</Text>
      {rows.map((row, i) => (
        <Group key={i} gap="xs" align="flex-end" wrap="nowrap">
          <NumberInput label={`Port ${i + 1}`} style={{ flex: 1, minWidth: 0 }} min={1} max={65_535} allowDecimal={false} hideControls value={row.port} onChange={(port) => change(replaced(rows, i, { port }))} error={field(`ports[${i}].port`, `ports[${i}]`)} />
          <Select label="Protocol" aria-label={`Port ${i + 1}: protocol`} w={90} data={['tcp', 'udp']} allowDeselect={false} value={row.protocol} onChange={(protocol) => change(replaced(rows, i, { protocol: protocol ?? 'tcp' }))} error={field(`ports[${i}].protocol`)} />
          <TextInput label="Name" aria-label={`Port ${i + 1}: name`} style={{ flex: 1, minWidth: 0 }} value={row.name} onChange={(e) => change(replaced(rows, i, { name: e.currentTarget.value }))} error={field(`ports[${i}].name`)} />
          <ActionIcon variant="subtle" color="red" size="lg" aria-label={`Do not open port ${i + 1}`} onClick={() => change(rows.filter((_, at) => at !== i))}><IconTrash size={18} aria-hidden /></ActionIcon>
        </Group>
      ))}
      <Group><Button size="xs" variant="default" disabled={rows.length >= 16} onClick={() => change([...rows, { port: '', protocol: 'tcp', name: '' }])}>Add port</Button></Group>
    </Stack>
  );
}

/** Every declared port, and where it is reached once the cluster has said so. */
export function PublicPorts({ job }: { job: Job }) {
  const declared = job.ports ?? [];
  if (declared.length === 0) return null;
  const attempts = (job.replica_list ?? []).flatMap((r) => (r.attempts ?? []).slice(-1));
  const known = attempts.flatMap((a) => (a.nodes ?? []).flatMap((n) => n.ports ?? []));
  const where = (p: PortAddress) => (p.hosts ?? []).map((h) => `${h.includes(':') ? `[${h}]` : h}:${p.public_port}`);
  return (
    <Card withBorder component="section" aria-label="Public ports">
      <Title order={4} mb="xs">Public ports</Title>
      <Table>
        <Table.Thead><Table.Tr><Table.Th>Port</Table.Th><Table.Th>Reached at</Table.Th></Table.Tr></Table.Thead>
        <Table.Tbody>
          {declared.map((p) => {
            const addresses = known.filter((k) => k.port === p.port && k.protocol === p.protocol && k.public_port > 0).flatMap(where);
            return (
              <Table.Tr key={`${p.protocol}/${p.port}`}>
                <Table.Td>{p.port}/{p.protocol}<Text size="xs" c="dimmed">{p.name}</Text></Table.Td>
                <Table.Td style={{ overflowWrap: 'anywhere' }}>
                  {addresses.map((a) => <div key={a}><Code>{a}</Code></div>)}
                  {addresses.length === 0 && <Text size="sm" c="dimmed">{ended(job.state) ? 'nowhere: the job has ended' : 'not yet: the cluster has not said'}</Text>}
                </Table.Td>
              </Table.Tr>
            );
          })}
        </Table.Tbody>
      </Table>
    </Card>
  );
}
