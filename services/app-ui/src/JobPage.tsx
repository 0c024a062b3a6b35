import { Alert, Badge, Button, Card, Code, DataList, Group, SimpleGrid, Stack, Text, Timeline, Title } from '@mantine/core';
import { useQuery, useQueryClient } from '@tanstack/react-query';
import { type ReactNode, useEffect, useState } from 'react';
import { Link } from 'wouter';
import { AttemptCard, EarlierAttempts } from './Attempts';
import { type AvailableGPU, call, ended, followJob, type Job, type JobEvent, read } from './api';
import { plural, since, span, when } from './format';
import { JobActions } from './JobActions';
import { Limits } from './Limits';
import { useActors } from './me';
import { Explanation, Failure, kindText, Loading, Page, sentence, StateBadge, useNow, words } from './parts';
import { PublicPorts } from './VolumesAndPorts';
import { states } from './words';

export function JobPage({ id }: { id: string }) {
  const [job, setJob] = useState<Job | null>(null);
  const [gone, setGone] = useState(false);
  const [broken, setBroken] = useState<unknown>(null);
  useEffect(() => {
    const abort = new AbortController();
    setJob(null);
    setGone(false);
    void followJob(id, abort.signal, setJob, () => setGone(true), setBroken);
    return () => abort.abort();
  }, [id]);
  if (gone) return <Alert title="This job is deleted">Nothing of it is left in the cluster. <Link href="/jobs">Back to jobs</Link></Alert>;
  if (!job) return broken ? <Failure error={broken} /> : <Loading />;
  const replicas = job.replica_list ?? [];
  const attempts = replicas.map((r) => r.attempts ?? []);
  return (
    <Page title={job.name} actions={<JobActions job={job} changed={setJob} />}>
      {broken !== null && <Alert color="orange" title={`What is shown may be old: ${(broken as Error).message}`} role="status" />}
      <Group gap="xs" aria-live="polite">
        <StateBadge state={job.state} />
        {job.simulated && <Badge color="grape" variant="outline">simulated</Badge>}
        {(job.tags ?? []).map((t) => <Badge key={t} color="gray" variant="outline" tt="none">{t}</Badge>)}
      </Group>
      <Why job={job} />
      {(job.conditions ?? []).map((c) => (
        <Alert key={c.kind} color="yellow" title={`${words(c.kind)}${c.since ? `, since ${when(c.since)}` : ''}`} data-testid={`condition-${c.kind}`}><Explanation condition={c.kind} message={c.message} /></Alert>
      ))}
      {job.state === 'queued' && <Queue job={job} />}
      <SimpleGrid cols={{ base: 1, md: 2 }}>
        <Card withBorder><Facts job={job} /></Card>
        <Limits job={job} />
      </SimpleGrid>
      <PublicPorts job={job} />
      {replicas.map((r, i) => attempts[i]!.slice(-1).filter((a) => a.rack_id || replicas.length > 1).map((a) => <AttemptCard key={a.id} job={job} replica={r} attempt={a} many={replicas.length > 1} />))}
      <EarlierAttempts replicas={replicas} />
      <History job={job} />
    </Page>
  );
}

/** Why the job is in its state, what that means and what helps. */
function Why({ job }: { job: Job }) {
  if (!job.reason && !job.message && !ended(job.state)) return null;
  const color = job.state === 'failed' ? 'red' : job.state === 'queued' ? 'yellow' : 'blue';
  return (
    <Alert color={color} title={words(job.reason) || (states[job.state]?.label ?? job.state)} data-testid="reason">
      <Explanation reason={job.reason} message={job.message} />
      {ended(job.state) && job.state !== 'failed' && states[job.state] && <Text size="sm" mt={4}>{sentence(states[job.state]!.means)}</Text>}
    </Alert>
  );
}

/** Since when the job waits, and who else waits for the same. */
function Queue({ job }: { job: Job }) {
  const now = useNow();
  const model = job.gpu?.model ?? '';
  const gpus = useQuery({ ...read<{ gpus: AvailableGPU[] | null }>(`/gpus?${new URLSearchParams({ location: job.location, model })}`), enabled: model !== '', refetchInterval: 5000 });
  const waiting = (job.replica_list ?? []).flatMap((r) => (r.attempts ?? []).slice(-1)).filter((a) => a.state === 'queued' && a.created_at);
  const longest = Math.max(0, ...waiting.map((a) => since(a.created_at!, now)));
  const free = gpus.data?.gpus?.[0];
  return (
    <Card withBorder data-testid="queue">
      <Title order={4} mb="xs">In the queue</Title>
      <Text size="sm">Waits for {span(longest)}, with priority {job.priority}.</Text>
      {free && (
        <Text size="sm">
          {free.waiting > 1 ? `${plural(free.waiting, 'replica')} wait for ${free.model} in ${free.location}, this job's among them; the longest for ${span(free.longest_wait_seconds)}.` : `Nobody else waits for ${free.model} in ${free.location}.`}
          {` ${free.held} of ${free.total} are held.`}
        </Text>
      )}
      <Text size="sm" c="dimmed">Higher priority goes first, then who has waited longest. Who does not fit is passed by others, but not for ever.</Text>
    </Card>
  );
}

function Facts({ job }: { job: Job }) {
  const gpus = job.gpu?.count ?? 0;
  const rows: [string, ReactNode][] = [
    ['Id', <Code key="id">{job.id}</Code>],
    ['Kind', kindText(job.kind)],
    ['GPUs', gpus > 0 ? `${gpus} × ${job.gpu!.model}${job.replicas > 1 ? ' a replica' : ''}` : 'none'],
    ['CPU, memory', `${job.cpu_cores_per_gpu * Math.max(gpus, 1)} cores, ${job.memory_gib_per_gpu * Math.max(gpus, 1)} GiB${job.replicas > 1 ? ' a replica' : ''}`],
    ['Location', job.location],
    ['Created', when(job.created_at)],
    ['Priority', `${job.priority}, placement ${job.placement}`],
  ];
  if (job.image) rows.push(['Image', job.image], ['Disk', `${job.disk_gib} GB`]);
  for (const v of job.volumes ?? []) rows.push([`Volume ${v.name}`, <span key={v.id}><Code>{v.path}</Code>{v.read_only ? ', to read only' : ''}</span>]);
  if (job.model) rows.push(['Model', `${job.model} (${job.runtime}), ${plural(job.replicas, 'replica')}`]);
  if (job.endpoint_id) rows.push(['Endpoint', <Code key="e">{`${location.origin}/inference/e/${job.endpoint_id}/v1`}</Code>]);
  if (job.kind === 'gpu_container') rows.push(['Shell', <Code key="s">{`cosmicac jobs shell ${job.id}`}</Code>]);
  return (
    <DataList orientation="horizontal" labelWidth={110} size="sm">
      {rows.map(([label, value]) => (
        <DataList.Item key={label}>
          <DataList.ItemLabel>{label}</DataList.ItemLabel>
          <DataList.ItemValue style={{ overflowWrap: 'anywhere', minWidth: 0 }}>{value}</DataList.ItemValue>
        </DataList.Item>
      ))}
    </DataList>
  );
}

const shownAtFirst = 6;

/** Every transition, newest first, read again after each change of the job. */
function History({ job }: { job: Job }) {
  const queries = useQueryClient();
  const key = ['history', job.id];
  const history = useQuery({ queryKey: key, queryFn: ({ signal }) => call<{ events: JobEvent[] | null }>('GET', `/api/v1/jobs/${job.id}/history`, undefined, signal) });
  useEffect(() => { void queries.invalidateQueries({ queryKey: ['history', job.id] }); }, [queries, job.id, job.revision]);
  const [all, setAll] = useState(false);
  const events = [...(history.data?.events ?? [])].reverse();
  const named = useActors();
  const number = new Map((job.replica_list ?? []).flatMap((r) => (r.attempts ?? []).map((a) => [a.id, job.replicas > 1 ? `replica ${r.index}, attempt ${a.number}` : `attempt ${a.number}`])));
  return (
    <Stack component="section" aria-label="History" gap="sm">
      <Title order={4}>History</Title>
      <Failure error={history.error} />
      {history.isPending && <Loading />}
      <Timeline bulletSize={12} lineWidth={2} styles={{ item: { marginTop: 12 }, itemTitle: { fontSize: 'var(--mantine-font-size-sm)', marginBottom: 2 } }}>
        {events.slice(0, all ? undefined : shownAtFirst).map((e) => (
          <Timeline.Item key={e.sequence} title={`${states[e.state]?.label ?? e.state}${e.reason ? `: ${words(e.reason)}` : ''}`}>
            {e.message && <Text size="sm" style={{ overflowWrap: 'anywhere' }}>{e.message}</Text>}
            <Text size="xs" c="dimmed">{[when(e.time), e.actor && `by ${named(e.actor)}`, number.get(e.attempt_id)].filter(Boolean).join(', ')}</Text>
          </Timeline.Item>
        ))}
      </Timeline>
      {!all && events.length > shownAtFirst && <Group><Button size="xs" variant="default" onClick={() => setAll(true)}>Show all {events.length}</Button></Group>}
    </Stack>
  );
}
