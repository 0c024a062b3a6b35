import { ActionIcon, Alert, Badge, Card, Group, Menu, SimpleGrid, Text, Title, Tooltip } from '@mantine/core';
import { IconDots } from '@tabler/icons-react';
import { useQuery } from '@tanstack/react-query';
import { useState } from 'react';
import { type NodeGPU, type Quarantine, type Rack, type RackNode, read } from './api';
import { Forgotten } from './Forgotten';
import { ago, when } from './format';
import { useMe } from './me';
import { Failure, Loading, Page } from './parts';
import { LiftQuarantine, Quarantines, SetQuarantine } from './Quarantines';
import { RackActions } from './RackActions';

export function Racks() {
  const { may } = useMe();
  const admin = may('admin');
  const racks = useQuery({ ...read<{ racks: Rack[] | null }>('/racks'), refetchInterval: 2000 });
  const quarantines = useQuery({ ...read<{ quarantines: Quarantine[] | null }>('/quarantines'), enabled: admin, refetchInterval: 5000 });
  const list = racks.data?.racks ?? [];
  return (
    <Page title="Racks">
      <Failure error={racks.error} />
      {racks.isPending && <Loading />}
      {racks.isSuccess && list.length === 0 && <Text c="dimmed">There is no rack. An operator registers one with cosmicac racks register.</Text>}
      {list.length > 0 && <Group gap="lg"><Legend color="indigo" text="held" /><Legend color="green" text="free" /><Legend color="gray" text="not offered" /></Group>}
      {list.map((r) => (
        <Card withBorder key={r.id} component="section" aria-label={`Rack ${r.id}`} data-testid={`rack-${r.id}`}>
          <Group mb="sm" justify="space-between" align="flex-start" wrap="nowrap">
            <Group gap="xs">
              <Title order={4}>{r.id}</Title>
              <Badge variant="light" tt="none">{r.location}</Badge>
              <Badge color={r.connected ? 'green' : 'red'} variant="light">{r.connected ? 'connected' : `last seen ${ago(r.last_seen_at)}`}</Badge>
              {r.drain_deadline ? <Badge color="orange" variant="light">draining</Badge> : r.cordoned && <Badge color="yellow" variant="light">cordoned</Badge>}
              {r.simulated && <Badge color="grape" variant="outline">simulated</Badge>}
            </Group>
            {admin && <RackActions rack={r} />}
          </Group>
          {r.message && <Alert color="yellow" mb="sm">{r.message}</Alert>}
          {r.drain_deadline && <Text size="sm" mb="sm">What runs here is stopped at {when(r.drain_deadline)}. Uncordon takes it back.</Text>}
          {!r.connected && (r.nodes ?? []).length > 0 && <Text size="sm" c="dimmed" mb="sm">As last heard; what is true now nobody can say.</Text>}
          {(r.nodes ?? []).length === 0 && <Text size="sm" c="dimmed">Its worker has reported no node.</Text>}
          <SimpleGrid cols={{ base: 1, xs: 2, lg: 4 }}>{(r.nodes ?? []).map((n) => <NodePicture key={n.name} rack={r} node={n} quarantines={quarantines.data?.quarantines ?? []} admin={admin} />)}</SimpleGrid>
        </Card>
      ))}
      {admin && <Quarantines list={quarantines.data?.quarantines} error={quarantines.error} />}
      {admin && <Forgotten />}
    </Page>
  );
}

function Legend({ color, text }: { color: string; text: string }) {
  return <Group gap={6}><Square color={color} /><Text size="sm">{text}</Text></Group>;
}

function Square({ color }: { color: string }) {
  return <div style={{ width: 18, height: 18, borderRadius: 4, background: color === 'gray' ? 'light-dark(var(--mantine-color-gray-4), var(--mantine-color-dark-2))' : `var(--mantine-color-${color}-5)` }} />;
}

function NodePicture({ rack, node, quarantines, admin }: { rack: Rack; node: RackNode; quarantines: Quarantine[]; admin: boolean }) {
  const here = quarantines.filter((q) => q.active && q.rack_id === rack.id && q.node_name === node.name);
  const [asking, ask] = useState<'set' | Quarantine | null>(null);
  return (
    <Card withBorder padding="sm" data-testid={`node-${node.name}`}>
      <Group justify="space-between" wrap="nowrap">
        <Text fw={600} size="sm">{node.name}</Text>
        {admin && (
          <Menu position="bottom-end">
            <Menu.Target><ActionIcon variant="subtle" color="gray" size="sm" aria-label={`Actions for node ${node.name}`}><IconDots size={16} aria-hidden /></ActionIcon></Menu.Target>
            <Menu.Dropdown>
              <Menu.Item onClick={() => ask('set')}>Quarantine…</Menu.Item>
              {here.map((q) => <Menu.Item key={q.gpu_model} onClick={() => ask(q)}>Lift the quarantine{q.gpu_model ? ` of ${q.gpu_model}` : ''}…</Menu.Item>)}
            </Menu.Dropdown>
          </Menu>
        )}
      </Group>
      {(node.gpus ?? []).map((reported) => {
        // What nobody is given is not free, whatever the worker could offer.
        const g = { ...reported, offerable: rack.connected && !reported.quarantine ? reported.offerable : 0 };
        const why = g.quarantine ? `quarantined: ${g.quarantine}` : g.message;
        return (
          <div key={g.model}>
            <Text size="xs" c="dimmed" mb={4} style={{ overflowWrap: 'anywhere' }}>{g.model}</Text>
            <Group gap={4} role="img" aria-label={`${g.model}: ${g.held} held, ${g.offerable} free of ${g.total}`}>
              {squares(g).map((color, i) => <Tooltip key={i} label={color === 'indigo' ? 'held' : color === 'green' ? 'free' : why || node.message || 'not offered'}><span><Square color={color} /></span></Tooltip>)}
            </Group>
            <Text size="xs" mt={4}>{g.held} held, {g.offerable} free of {g.total}{g.healthy < g.total ? `, ${g.total - g.healthy} not healthy` : ''}</Text>
            {why && <Text size="xs" c="orange">{why}</Text>}
          </div>
        );
      })}
      {!node.schedulable && <Text size="xs" c="orange">{node.message || 'not schedulable'}</Text>}
      <SetQuarantine rack={rack.id} node={node} opened={asking === 'set'} onClose={() => ask(null)} />
      <LiftQuarantine of={asking === 'set' ? null : asking} onClose={() => ask(null)} />
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
