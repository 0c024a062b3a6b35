// What one could get now, by model and location, and who waits for it.
import { Badge, Card, Group, Progress, Stack, Text, Title, UnstyledButton } from '@mantine/core';
import type { AvailableGPU } from './api';
import { money, plural, span } from './format';
import { Failure, Loading, words } from './parts';

export function GPUsNow({ gpus, error, location, model, choose }: {
  gpus: AvailableGPU[] | null | undefined; error: unknown; location: string | null; model: string | null; choose: (g: AvailableGPU) => void;
}) {
  return (
    <Stack component="section" aria-label="GPUs available now">
      <Title order={4}>GPUs available now</Title>
      {gpus === undefined && !error && <Loading />}
      <Failure error={error} />
      {gpus !== undefined && (gpus ?? []).length === 0 && <Text c="dimmed">No rack offers a GPU.</Text>}
      {(gpus ?? []).map((g) => {
        const chosen = g.model === model && g.location === location;
        return (
          <UnstyledButton key={`${g.location}/${g.model}`} onClick={() => choose(g)} aria-pressed={chosen} data-testid={`available-${g.location}-${g.model}`}>
            <Card withBorder style={chosen ? { borderColor: 'var(--mantine-primary-color-filled)' } : undefined}>
              <Group justify="space-between" wrap="nowrap" mb={6}>
                <Text fw={600} size="sm" style={{ overflowWrap: 'anywhere' }}>{g.model}</Text>
                <Badge variant="light" tt="none">{g.location}</Badge>
              </Group>
              <Progress value={g.total > 0 ? (100 * g.offerable) / g.total : 0} color="green" aria-label={`${g.offerable} of ${g.total} free`} />
              <Text size="sm" mt={6}>{g.offerable} of {g.total} free in {g.location}{g.offerable > 0 ? `, at most ${g.largest_node_offerable} on one node` : ''}</Text>
              <Text size="sm" c="dimmed">{g.waiting === 0 ? 'Nobody waits' : `${plural(g.waiting, 'replica waits', 'replicas wait')} for ${plural(g.waiting_gpus, 'GPU')}, the longest for ${span(g.longest_wait_seconds)}`}</Text>
              {g.price_cents_per_gpu_hour != null && <Text size="sm" c="dimmed">{money(g.price_cents_per_gpu_hour, g.currency)} for a GPU and hour</Text>}
              {(g.racks ?? []).filter((r) => r.reason !== '' && r.reason !== 'busy').map((r) => <Text key={r.id} size="sm" c="orange" title={r.message}>rack {r.id}: {words(r.reason)}</Text>)}
            </Card>
          </UnstyledButton>
        );
      })}
    </Stack>
  );
}
