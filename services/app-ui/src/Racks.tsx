import { Alert, Badge, Card, Group, Loader, SimpleGrid, Stack, Text, Title, Tooltip } from '@mantine/core';
import { useQuery } from '@tanstack/react-query';
import { call, type NodeGPU, type Rack, type RackNode } from './api';
import { ago, Failure } from './parts';

export function Racks() {
  const racks = useQuery({ queryKey: ['racks'], queryFn: ({ signal }) => call<{ racks: Rack[] | null }>('GET', '/api/v1/racks', undefined, signal), refetchInterval: 2000 });
  return (
    <Stack>
      <Title order={2}>Racks</Title>
      <Failure error={racks.error} />
      {racks.isPending && <Loader />}
      <Group gap="lg"><Legend color="indigo" text="held" /><Legend color="green" text="free" /><Legend color="gray" text="not offered" /></Group>
      {(racks.data?.racks ?? []).map((r) => (
        <Card withBorder key={r.id} data-testid={`rack-${r.id}`}>
          <Group mb="sm">
            <Title order={4}>{r.id}</Title>
            <Badge variant="light">{r.location}</Badge>
            <Badge color={r.connected ? 'green' : 'red'} variant="light">{r.connected ? 'connected' : `not seen since ${ago(r.last_seen_at)}`}</Badge>
            {r.cordoned && <Badge color="yellow">cordoned</Badge>}
            {r.simulated && <Badge color="grape" variant="outline">simulated</Badge>}
          </Group>
          {r.message && <Alert color="yellow" mb="sm">{r.message}</Alert>}
          <SimpleGrid cols={{ base: 1, sm: 2, lg: 4 }}>{(r.nodes ?? []).map((n) => <NodePicture key={n.name} node={n} />)}</SimpleGrid>
        </Card>
      ))}
    </Stack>
  );
}

function Legend({ color, text }: { color: string; text: string }) {
  return <Group gap={6}><Square color={color} /><Text size="sm">{text}</Text></Group>;
}

function Square({ color }: { color: string }) {
  return <div style={{ width: 18, height: 18, borderRadius: 4, background: `var(--mantine-color-${color}-5)` }} />;
}

function NodePicture({ node }: { node: RackNode }) {
  return (
    <Card withBorder padding="sm" data-testid={`node-${node.name}`}>
      <Text fw={600} size="sm">{node.name}</Text>
      {(node.gpus ?? []).map((g) => (
        <div key={g.model}>
          <Text size="xs" c="dimmed" mb={4}>{g.model}</Text>
          <Group gap={4} role="img" aria-label={`${g.held} held, ${g.offerable} free of ${g.total}`}>
            {squares(g).map((color, i) => <Tooltip key={i} label={color === 'indigo' ? 'held' : color === 'green' ? 'free' : g.message || node.message || 'not offered'}><span><Square color={color} /></span></Tooltip>)}
          </Group>
          <Text size="xs" mt={4}>{g.held} held, {g.offerable} free of {g.total}</Text>
          {g.message && <Text size="xs" c="orange">{g.message}</Text>}
        </div>
      ))}
      {!node.schedulable && <Text size="xs" c="orange">{node.message || 'not schedulable'}</Text>}
    </Card>
  );
}

/** One colour a GPU: held first, then free, then what is not offered. */
export function squares(g: NodeGPU): string[] {
  const total = Math.min(g.total, 64);
  const held = Math.min(g.held, total);
  const free = Math.min(g.offerable, total - held);
  return [...Array(held).fill('indigo'), ...Array(free).fill('green'), ...Array(total - held - free).fill('gray')] as string[];
}
