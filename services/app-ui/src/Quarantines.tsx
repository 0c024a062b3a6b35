// Nodes that are left out of placement or suspect: the evidence, and the way back.
import { Accordion, Badge, Button, Card, Group, Select, Stack, Table, Text, TextInput, Title } from '@mantine/core';
import { useQueryClient } from '@tanstack/react-query';
import { useState } from 'react';
import { Link } from 'wouter';
import { Ask } from './Ask';
import { call, type Quarantine, type RackNode } from './api';
import { plural, when } from './format';
import { useActors } from './me';
import { Failure, Loading, words } from './parts';

const what = (q: Quarantine) => `${q.node_name}${q.gpu_model ? `, ${q.gpu_model}` : ''}`;

export function Quarantines({ list, error }: { list: Quarantine[] | null | undefined; error: unknown }) {
  const named = useActors();
  const [lifting, lift] = useState<Quarantine | null>(null);
  return (
    <Stack component="section" aria-label="Quarantine" gap="sm">
      <Title order={3}>Quarantine</Title>
      <Failure error={error} />
      {list === undefined && !error && <Loading />}
      {list !== undefined && (list ?? []).length === 0 && <Text c="dimmed">No node is quarantined or suspect.</Text>}
      {(list ?? []).map((q) => (
        <Card withBorder key={`${q.rack_id}/${q.node_name}/${q.gpu_model}`} data-testid={`quarantine-${q.node_name}`}>
          <Group justify="space-between" align="flex-start">
            <Group gap="xs">
              <Text fw={600}>{what(q)}</Text>
              <Badge variant="light" color="gray" tt="none">rack {q.rack_id}</Badge>
              <Badge variant="light" color={q.active ? 'red' : 'yellow'}>{q.active ? 'quarantined' : 'suspect'}</Badge>
            </Group>
            <Button size="xs" variant="default" onClick={() => lift(q)}>{q.active ? 'Lift…' : 'Clear…'}</Button>
          </Group>
          {q.message && <Text size="sm" mt={4}>{q.message}</Text>}
          <Text size="xs" c="dimmed">{[q.since && `since ${when(q.since)}`, q.actor && `by ${named(q.actor)}`].filter(Boolean).join(', ')}</Text>
          {(q.evidence ?? []).length > 0 && (
            <Accordion variant="filled" mt="sm" order={4}>
              <Accordion.Item value="evidence">
                <Accordion.Control><Text size="sm">Evidence: {plural(q.evidence!.length, 'start')} that failed</Text></Accordion.Control>
                <Accordion.Panel>
                  <Table.ScrollContainer minWidth={560}>
                    <Table>
                      <Table.Thead><Table.Tr><Table.Th>When</Table.Th><Table.Th>Attempt</Table.Th><Table.Th>Why it failed</Table.Th></Table.Tr></Table.Thead>
                      <Table.Tbody>
                        {q.evidence!.map((f) => (
                          <Table.Tr key={f.attempt_id}>
                            <Table.Td>{f.time ? when(f.time) : '–'}</Table.Td>
                            <Table.Td><Link href={`/jobs/${f.job_id}`}>{f.attempt_id}</Link></Table.Td>
                            <Table.Td>
                              <Text size="sm">{[words(f.reason), f.message].filter(Boolean).join(': ')}</Text>
                              {(f.gpu_uuids ?? []).length > 0 && <Text size="xs" c="dimmed">GPUs as the agent saw them: {f.gpu_uuids!.join(', ')}</Text>}
                            </Table.Td>
                          </Table.Tr>
                        ))}
                      </Table.Tbody>
                    </Table>
                  </Table.ScrollContainer>
                </Accordion.Panel>
              </Accordion.Item>
            </Accordion>
          )}
        </Card>
      ))}
      <LiftQuarantine of={lifting} onClose={() => lift(null)} />
    </Stack>
  );
}

function useAgain() {
  const queries = useQueryClient();
  return () => Promise.all(['/quarantines', '/racks', '/gpus'].map((key) => queries.invalidateQueries({ queryKey: [key] })));
}

export function SetQuarantine({ rack, node, opened, onClose }: { rack: string; node: RackNode; opened: boolean; onClose: () => void }) {
  const again = useAgain();
  const [model, setModel] = useState('');
  const [message, setMessage] = useState('');
  const set = async () => {
    await call('POST', '/api/v1/quarantines', { rack_id: rack, node_name: node.name, gpu_model: model, message });
    setMessage('');
    await again();
  };
  return (
    <Ask opened={opened} onClose={onClose} title={`Quarantine ${node.name}?`} yes="Quarantine it" incomplete={message.trim() === ''} onYes={set}>
      <Text size="sm">No new work is placed there until somebody lifts it. What runs there goes on.</Text>
      <Select label="What" allowDeselect={false} data={[{ value: '', label: 'The whole node' }, ...(node.gpus ?? []).map((g) => ({ value: g.model, label: `Only its ${g.model}` }))]} value={model} onChange={(v) => setModel(v ?? '')} />
      <TextInput label="Why" required description="Users who wait for the node read it." maxLength={1024} value={message} onChange={(e) => setMessage(e.currentTarget.value)} data-autofocus />
    </Ask>
  );
}

export function LiftQuarantine({ of, onClose }: { of: Quarantine | null; onClose: () => void }) {
  const again = useAgain();
  return (
    <Ask opened={of !== null} onClose={onClose} title={of ? `Open ${what(of)} again?` : ''} yes="Open it again"
      onYes={async () => { await call('POST', '/api/v1/quarantines/lift', { rack_id: of!.rack_id, node_name: of!.node_name, gpu_model: of!.gpu_model }); await again(); }}>
      <Text size="sm">Work is placed there again, and the failures that led to this are forgotten: it takes as many again before it is quarantined by itself.</Text>
    </Ask>
  );
}
