// The picture of the mesh: every daemon on a circle, and how each two are connected.
import { Alert, Badge, Card, Group, Table, Text, Title } from '@mantine/core';
import { useQuery } from '@tanstack/react-query';
import { useState } from 'react';
import { type Mesh, type MeshLink, type MeshNode, read } from './api';
import { ago } from './format';
import { Failure, Loading, Page } from './parts';

const width = 760, height = 460, radiusX = 270, radiusY = 165;

export function Network() {
  const mesh = useQuery({ ...read<Mesh>('/mesh'), refetchInterval: 5000 });
  const [chosen, choose] = useState<string | null>(null);
  const nodes = mesh.data?.nodes ?? [];
  const links = mesh.data?.links ?? [];
  const name = (key: string) => nodes.find((n) => n.key === key)?.name ?? `${key.slice(0, 12)}…`;
  const shown = chosen === null ? links : links.filter((l) => l.from === chosen || l.to === chosen);
  return (
    <Page title="Network">
      <Failure error={mesh.error} />
      {mesh.isPending && <Loading />}
      {mesh.data && !mesh.data.complete && <Alert color="yellow" title="Part of the picture">A daemon did not answer; what only it knows is not drawn.</Alert>}
      {mesh.data && (
        <Card withBorder>
          <Picture nodes={nodes} links={links} chosen={chosen} choose={choose} />
          <Group gap="lg"><Line color="green" text="direct" /><Line color="orange" dashed text="by relay" /><Line color="red" text="silent for 2 s" /></Group>
        </Card>
      )}
      {chosen !== null && nodes.filter((n) => n.key === chosen).map((n) => <About key={n.key} node={n} />)}
      {mesh.data && (
        <Table.ScrollContainer minWidth={760}><Table data-testid="links">
          <Table.Thead><Table.Tr>{['From', 'To', 'Path', 'Transport', 'Round trip', 'Address', 'Since'].map((h) => <Table.Th key={h}>{h}</Table.Th>)}</Table.Tr></Table.Thead>
          <Table.Tbody>
            {shown.map((l) => (
              <Table.Tr key={`${l.from}/${l.to}`}>
                <Table.Td>{name(l.from)}</Table.Td>
                <Table.Td>{name(l.to)}</Table.Td>
                <Table.Td>{l.path}{l.suspect && <Badge ml="xs" color="red" variant="light">silent</Badge>}</Table.Td>
                <Table.Td>{l.transport}</Table.Td>
                <Table.Td>{l.round_trip_microseconds > 0 ? `${(l.round_trip_microseconds / 1000).toFixed(1)} ms` : '–'}</Table.Td>
                <Table.Td><Text size="xs" ff="monospace">{l.address}</Text></Table.Td>
                <Table.Td>{ago(l.connected_at)}</Table.Td>
              </Table.Tr>
            ))}
          </Table.Tbody>
        </Table></Table.ScrollContainer>
      )}
    </Page>
  );
}

function Picture({ nodes, links, chosen, choose }: { nodes: MeshNode[]; links: MeshLink[]; chosen: string | null; choose: (key: string | null) => void }) {
  const places = new Map(nodes.map((n, i) => {
    const angle = (2 * Math.PI * i) / nodes.length - Math.PI / 2;
    return [n.key, { x: width / 2 + radiusX * Math.cos(angle), y: height / 2 + radiusY * Math.sin(angle) }];
  }));
  return (
    <svg viewBox={`0 0 ${width} ${height}`} style={{ width: '100%', maxHeight: 520 }} role="img" aria-label={`${nodes.length} daemons, ${links.length} links`} data-testid="picture">
      {links.map((l) => {
        const from = places.get(l.from), to = places.get(l.to);
        if (!from || !to) return null;
        const color = l.suspect ? 'red' : l.path === 'relay' ? 'orange' : 'green';
        const faint = chosen !== null && l.from !== chosen && l.to !== chosen;
        return (
          <line key={`${l.from}/${l.to}`} x1={from.x} y1={from.y} x2={to.x} y2={to.y} stroke={`var(--mantine-color-${color}-6)`} strokeWidth={2}
            strokeDasharray={l.path === 'relay' ? '6 4' : undefined} opacity={faint ? 0.15 : 0.8} />
        );
      })}
      {nodes.map((n) => {
        const at = places.get(n.key)!;
        const color = n.state === 'silent' ? 'red' : n.ready ? 'green' : 'yellow';
        const pick = () => choose(chosen === n.key ? null : n.key);
        return (
          <g key={n.key} transform={`translate(${at.x} ${at.y})`} style={{ cursor: 'pointer' }} role="button" tabIndex={0} aria-label={n.name} aria-pressed={chosen === n.key}
            onClick={pick} onKeyDown={(e) => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); pick(); } }}>
            <circle r={chosen === n.key ? 15 : 12} fill={`var(--mantine-color-${color}-5)`} stroke="var(--mantine-color-body)" strokeWidth={3} />
            <text y={at.y > height / 2 ? 32 : -22} textAnchor="middle" fontSize={13} fill="currentColor">{n.name}</text>
          </g>
        );
      })}
    </svg>
  );
}

function About({ node }: { node: MeshNode }) {
  return (
    <Card withBorder data-testid={`daemon-${node.name}`}>
      <Group mb="xs">
        <Title order={4}>{node.name}</Title>
        <Badge color={node.state === 'silent' ? 'red' : 'green'} variant="light">{node.state === 'silent' ? `silent: ${node.reason}` : node.ready ? 'ready' : 'not ready'}</Badge>
        {(node.roles ?? []).map((r) => <Badge key={r} variant="outline">{r}</Badge>)}
      </Group>
      <Text size="xs" ff="monospace">{node.key}</Text>
      {node.state !== 'silent' && <Text size="sm">version {node.version}, started {ago(node.started_at)}, clock {node.clock_ahead_ms.toFixed(0)} ms ahead</Text>}
      {node.peers_known && <Text size="sm">{node.agents} agents, {node.clients} command lines, {node.others} others connected</Text>}
      {(node.warnings ?? []).map((w) => <Alert key={w.code} color={w.severity === 'error' ? 'red' : 'yellow'} title={w.text} mt="xs">{w.remedy}</Alert>)}
    </Card>
  );
}

function Line({ color, text, dashed }: { color: string; text: string; dashed?: boolean }) {
  return <Group gap={6}><div style={{ width: 26, borderTop: `2px ${dashed ? 'dashed' : 'solid'} var(--mantine-color-${color}-6)` }} /><Text size="sm">{text}</Text></Group>;
}
