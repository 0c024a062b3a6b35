// What a job may use, and how much of it is used.
import { Card, Progress, Stack, Text, Title } from '@mantine/core';
import { useQuery } from '@tanstack/react-query';
import { ended, type Job, read } from './api';
import { money, since, span, when } from './format';
import { useNow } from './parts';

export function Limits({ job }: { job: Job }) {
  const now = useNow();
  const priced = job.price_cents_per_gpu_hour != null;
  // The cost grows without a change of the job, so it is asked for.
  const fresh = useQuery({ ...read<Job>(`/jobs/${job.id}`), enabled: priced && !ended(job.state), refetchInterval: 10_000 });
  const cost = Math.max(job.cost_cents, fresh.data?.cost_cents ?? 0);
  const running = (job.replica_list ?? []).flatMap((r) => (r.attempts ?? []).slice(-1)).filter((a) => a.state === 'running' && a.running_at);
  const ran = Math.max(0, ...running.map((a) => since(a.running_at!, now)));
  const idle = (job.conditions ?? []).find((c) => c.kind === 'idle');
  return (
    <Card withBorder>
      <Stack gap="sm" component="section" aria-label="Limits">
        <Title order={4}>Limits</Title>
        {job.max_duration_seconds > 0
          ? <Meter name="Running time" used={ran} most={job.max_duration_seconds} text={running.length > 0 ? `Ran for ${span(ran)} of ${span(job.max_duration_seconds)}` : `Stops after running for ${span(job.max_duration_seconds)}`} />
          : <Text size="sm">{running.length > 0 ? `Ran for ${span(ran)}, without a limit` : 'Runs without a limit of time'}</Text>}
        {job.kind === 'gpu_container' && (job.idle_stop_seconds > 0
          ? <Meter name="Idle" used={idle?.since ? since(idle.since, now) : 0} most={job.idle_stop_seconds}
              text={idle?.since ? `Idle for ${span(since(idle.since, now))} of ${span(job.idle_stop_seconds)}; stops at ${when(new Date(idle.since).getTime() + job.idle_stop_seconds * 1000)}` : `Stops after ${span(job.idle_stop_seconds)} without GPU use and without a shell`} />
          : <Text size="sm">Not stopped when it is idle</Text>)}
        {job.cost_limit_cents > 0
          ? <Meter name="Cost" used={cost} most={job.cost_limit_cents} text={`Cost ${money(cost, job.currency)} of ${money(job.cost_limit_cents, job.currency)}`} />
          : <Text size="sm">{priced ? `Cost ${money(cost, job.currency)} so far, without a limit` : 'No limit of its cost: no price of its GPUs was known'}</Text>}
        <Text size="xs" c="dimmed">A limit that is reached stops the job like you would: its disks stay.</Text>
      </Stack>
    </Card>
  );
}

function Meter({ name, used, most, text }: { name: string; used: number; most: number; text: string }) {
  const share = Math.min(100, (100 * used) / most);
  return (
    <div>
      <Text size="sm">{text}</Text>
      <Progress value={share} color={share >= 90 ? 'red' : share >= 50 ? 'yellow' : 'indigo'} mt={4} aria-label={`${name}: ${Math.floor(share)} percent of its limit`} />
    </div>
  );
}
