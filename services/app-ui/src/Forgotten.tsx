// Racks that were removed by force, with what was left there, and what may be done
// once such a rack is back.
import { Badge, Button, Card, Group, Stack, Table, Text, Title } from '@mantine/core';
import { useQuery, useQueryClient } from '@tanstack/react-query';
import { useState } from 'react';
import { Link } from 'wouter';
import { Ask } from './Ask';
import { call, type ForgottenRack, read } from './api';
import { plural, when } from './format';
import { useActors } from './me';
import { Failure } from './parts';

export function Forgotten() {
  const racks = useQuery({ ...read<{ racks: ForgottenRack[] | null }>('/forgotten-racks'), refetchInterval: 5000 });
  const list = racks.data?.racks ?? [];
  // Seldom needed: there is no section while there is none.
  if (list.length === 0) return <Failure error={racks.error} />;
  return (
    <Stack component="section" aria-label="Forgotten racks" gap="sm">
      <Title order={3}>Forgotten racks</Title>
      <Text size="sm" c="dimmed">Removed by force. What was left there may still run; nobody can say until the rack is registered again.</Text>
      <Failure error={racks.error} />
      {list.map((r) => <ForgottenCard key={r.id} rack={r} />)}
    </Stack>
  );
}

function ForgottenCard({ rack }: { rack: ForgottenRack }) {
  const queries = useQueryClient();
  const named = useActors();
  const [asking, ask] = useState<'register' | 'adopt' | 'delete' | null>(null);
  const attempts = rack.attempts ?? [];
  const again = () => Promise.all(['/forgotten-racks', '/racks', '/gpus'].map((key) => queries.invalidateQueries({ queryKey: [key] })));
  const resolve = (action: 'adopt' | 'delete') => async () => {
    await call('POST', `/api/v1/forgotten-racks/${encodeURIComponent(rack.id)}`, { action, ...(action === 'delete' ? { confirm: rack.id } : {}) });
    await again();
  };
  const register = async () => {
    await call('PUT', `/api/v1/racks/${encodeURIComponent(rack.id)}`, { location: rack.location, key: rack.key });
    await again();
  };
  return (
    <Card withBorder data-testid={`forgotten-${rack.id}`}>
      <Group justify="space-between" align="flex-start">
        <Group gap="xs">
          <Text fw={600}>{rack.id}</Text>
          <Badge variant="light" tt="none">{rack.location}</Badge>
          <Badge variant="light" color={rack.returned ? 'green' : 'gray'}>{rack.returned ? 'registered again' : 'gone'}</Badge>
        </Group>
        <Group gap="xs">
          {rack.returned ? (
            <>
              <Button size="xs" variant="default" onClick={() => ask('adopt')}>Adopt…</Button>
              <Button size="xs" variant="light" color="red" onClick={() => ask('delete')}>Clear…</Button>
            </>
          ) : <Button size="xs" variant="default" onClick={() => ask('register')}>Register again…</Button>}
        </Group>
      </Group>
      <Text size="xs" c="dimmed">{[rack.forgotten_at && `forgotten ${when(rack.forgotten_at)}`, rack.actor && `by ${named(rack.actor)}`].filter(Boolean).join(', ')}</Text>
      {(rack.disk_job_ids ?? []).length > 0 && <Text size="sm" mt={4}>{plural(rack.disk_job_ids!.length, 'job')} may have root disks there.</Text>}
      {attempts.length > 0 && (
        <Table.ScrollContainer minWidth={520}>
          <Table>
            <Table.Thead><Table.Tr><Table.Th>Job</Table.Th><Table.Th>Attempt</Table.Th><Table.Th>Nodes</Table.Th><Table.Th>GPUs</Table.Th><Table.Th>Still there</Table.Th></Table.Tr></Table.Thead>
            <Table.Tbody>
              {attempts.map((a) => (
                <Table.Tr key={a.attempt_id}>
                  <Table.Td><Link href={`/jobs/${a.job_id}`}>{a.job_name}</Link></Table.Td>
                  <Table.Td>{a.attempt_id}</Table.Td>
                  <Table.Td>{(a.node_names ?? []).join(', ')}</Table.Td>
                  <Table.Td>{a.gpu_count}</Table.Td>
                  <Table.Td>{!rack.returned ? 'unknown' : a.present ? 'yes' : 'no'}</Table.Td>
                </Table.Tr>
              ))}
            </Table.Tbody>
          </Table>
        </Table.ScrollContainer>
      )}
      <Ask opened={asking === 'register'} onClose={() => ask(null)} title={`Register rack ${rack.id} again?`} yes="Register it" onYes={register}>
        <Text size="sm">Its entry is made anew, in location {rack.location}, with the key that it had. Its limits are not known any more: every GPU model is allowed, without a maximum, until cosmicac racks register sets them.</Text>
        <Text size="sm">What was abandoned there waits for your decision: adopt it, or clear it.</Text>
      </Ask>
      <Ask opened={asking === 'adopt'} onClose={() => ask(null)} title={`Adopt what is on rack ${rack.id}?`} yes="Adopt it" onYes={resolve('adopt')}>
        <Text size="sm">{plural(attempts.length, 'attempt')} and the disks there belong to their jobs again and go on as they were. What the rack does not list any more has ended.</Text>
      </Ask>
      <Ask opened={asking === 'delete'} onClose={() => ask(null)} title={`Clear rack ${rack.id}?`} yes="Stop and take down" no="Leave it" danger typed={rack.id} onYes={resolve('delete')}>
        <Text size="sm">What was abandoned there is stopped and taken down: {plural(attempts.length, 'attempt')}. Their open shells and memory are lost.</Text>
      </Ask>
    </Card>
  );
}
