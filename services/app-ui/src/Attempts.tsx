// A replica's attempts: where the newest is and what the cluster says of it, and
// how the earlier ones ended.
import { Accordion, Alert, Badge, Button, Card, Group, Table, Text, Title } from '@mantine/core';
import { useState } from 'react';
import { Ask } from './Ask';
import { type Attempt, call, type GraphNode, type Job, type Replica } from './api';
import { plural, span, when } from './format';
import { useMe } from './me';
import { StateBadge, useNow, words } from './parts';

const graphColor: Record<string, string> = { ready: 'green', failed: 'red', waiting: 'blue', creating: 'blue', pending: 'gray', deleting: 'orange', gone: 'gray' };

const place = (a: Attempt) => (a.rack_id ? `rack ${a.rack_id}${(a.nodes ?? []).map((n) => `, ${n.gpu_count > 0 ? `${plural(n.gpu_count, 'GPU')} on ` : ''}${n.node_name}`).join('')}` : 'no rack');

export function AttemptCard({ job, replica, attempt, many }: { job: Job; replica: Replica; attempt: Attempt; many: boolean }) {
  const { may } = useMe();
  const [fencing, setFencing] = useState(false);
  const graph = (attempt.nodes ?? []).flatMap((n) => n.graph ?? []);
  const silent = (job.conditions ?? []).some((c) => c.kind === 'unreachable') && !attempt.gone && attempt.rack_id !== '';
  return (
    <Card withBorder component="section" aria-label={many ? `Replica ${replica.index}` : 'Attempt'}>
      <Group justify="space-between" mb={4}>
        <Title order={4}>{many ? `Replica ${replica.index}, attempt ${attempt.number}` : `Attempt ${attempt.number}`}</Title>
        <Group gap={6}>
          <StateBadge state={attempt.state} />
          {attempt.gone && attempt.rack_id && <Badge variant="outline" color="gray">GPUs given back</Badge>}
          {attempt.abandoned && <Badge variant="outline" color="orange">abandoned</Badge>}
        </Group>
      </Group>
      <Text size="sm" c="dimmed">{place(attempt)}</Text>
      {attempt.message && attempt.message !== job.message && <Text size="sm" style={{ overflowWrap: 'anywhere' }}>{attempt.reason ? `${words(attempt.reason)}: ` : ''}{attempt.message}</Text>}
      {graph.length > 0 && (
        // Unfolded while something is on its way, folded once all of it is well.
        <Accordion key={String(attempt.state === 'running')} variant="filled" mt="sm" order={5} defaultValue={attempt.state === 'running' ? null : 'graph'}>
          <Accordion.Item value="graph">
            <Accordion.Control><Text size="sm">{plural(graph.length, 'cluster object')}{summary(graph)}</Text></Accordion.Control>
            <Accordion.Panel><Graph graph={graph} /></Accordion.Panel>
          </Accordion.Item>
        </Accordion>
      )}
      {silent && may('admin') && (
        <Alert color="yellow" mt="sm" title="It is not heard of, and nothing is assumed of it">
          <Text size="sm" mb="xs">If you know that its machine is off, it may be given up and replaced.</Text>
          <Button size="xs" color="red" variant="light" onClick={() => setFencing(true)}>Give it up…</Button>
        </Alert>
      )}
      <Ask opened={fencing} onClose={() => setFencing(false)} title={`Give up attempt ${attempt.id}?`} yes="Its machine is off: give it up" no="Wait for it" danger typed={attempt.id}
        onYes={() => call('POST', `/api/v1/attempts/${attempt.id}/fence`, { confirm: attempt.id })}>
        <Text size="sm">A new attempt may start elsewhere. If the machine still runs, two of them work at once, on {place(attempt)}: make sure first that it is off.</Text>
        <Text size="sm">Its GPUs stay held until the cluster says that nothing of it is left.</Text>
      </Ask>
    </Card>
  );
}

function summary(graph: GraphNode[]): string {
  const rest = graph.filter((g) => g.state !== 'ready');
  return rest.length === 0 ? ', all ready' : `: ${rest.map((g) => `${g.kind} ${g.state}`).join(', ')}`;
}

function Graph({ graph }: { graph: GraphNode[] }) {
  const now = useNow();
  return (
    <Table.ScrollContainer minWidth={480}>
      <Table>
        <Table.Thead><Table.Tr><Table.Th>Object</Table.Th><Table.Th>State</Table.Th><Table.Th>The cluster's words</Table.Th></Table.Tr></Table.Thead>
        <Table.Tbody>
          {graph.map((g) => (
            <Table.Tr key={`${g.kind}/${g.name}`}>
              <Table.Td><Text size="sm">{g.kind}</Text><Text size="xs" c="dimmed">{g.name}</Text></Table.Td>
              <Table.Td><Badge size="sm" variant="light" color={graphColor[g.state] ?? 'gray'}>{g.state}</Badge></Table.Td>
              <Table.Td>
                <Text size="sm">{g.message}</Text>
                {g.deadline && g.state !== 'ready' && <Text size="xs" c="dimmed">has {span((new Date(g.deadline).getTime() - now) / 1000)} left to become ready</Text>}
              </Table.Td>
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
    </Table.ScrollContainer>
  );
}

export function EarlierAttempts({ replicas }: { replicas: Replica[] }) {
  const earlier = replicas.flatMap((r) => (r.attempts ?? []).slice(0, -1).map((a) => ({ replica: r.index, a }))).sort((x, y) => (y.a.created_at ?? '').localeCompare(x.a.created_at ?? ''));
  if (earlier.length === 0) return null;
  return (
    <Card withBorder component="section" aria-label="Earlier attempts">
      <Title order={4} mb="xs">Earlier attempts</Title>
      <Table.ScrollContainer minWidth={560}>
        <Table>
          <Table.Thead><Table.Tr><Table.Th>Attempt</Table.Th><Table.Th>Outcome</Table.Th><Table.Th>Where</Table.Th><Table.Th>Ran</Table.Th></Table.Tr></Table.Thead>
          <Table.Tbody>
            {earlier.map(({ replica, a }) => (
              <Table.Tr key={a.id}>
                <Table.Td>{replicas.length > 1 ? `${replica}.` : ''}{a.number}</Table.Td>
                <Table.Td>
                  <StateBadge state={a.state} />
                  <Text size="sm" mt={2}>{[words(a.reason), a.message].filter(Boolean).join(': ')}</Text>
                  {!a.gone && <Text size="xs" c="orange">the cluster still holds something of it</Text>}
                </Table.Td>
                <Table.Td><Text size="sm">{place(a)}</Text></Table.Td>
                <Table.Td><Text size="sm">{a.running_at && a.ended_at ? `${when(a.running_at)}, for ${span((new Date(a.ended_at).getTime() - new Date(a.running_at).getTime()) / 1000)}` : 'never'}</Text></Table.Td>
              </Table.Tr>
            ))}
          </Table.Tbody>
        </Table>
      </Table.ScrollContainer>
    </Card>
  );
}
