import { Alert, Badge, Button, Card, Code, Group, Loader, Modal, Stack, Table, Text, Timeline, Title } from '@mantine/core';
import { useQuery } from '@tanstack/react-query';
import { useEffect, useState } from 'react';
import { Link, useLocation } from 'wouter';
import { type Attempt, call, ended, followJob, type Job, type JobEvent } from './api';
import { Failure, kindText, StateBadge, words } from './parts';

export function JobPage({ id }: { id: string }) {
  const [, go] = useLocation();
  const [job, setJob] = useState<Job | null>(null);
  const [gone, setGone] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const [confirming, setConfirming] = useState(false);
  useEffect(() => {
    const abort = new AbortController();
    setJob(null);
    setGone(false);
    void followJob(id, abort.signal, setJob, () => setGone(true));
    return () => abort.abort();
  }, [id]);
  const history = useQuery({ queryKey: ['history', id, job?.state, job?.reason], enabled: job !== null && !gone, queryFn: ({ signal }) => call<{ events: JobEvent[] | null }>('GET', `/api/v1/jobs/${id}/history`, undefined, signal) });
  const act = async (method: string, suffix: string) => {
    setError(null);
    setConfirming(false);
    try {
      const after = await call<Job | undefined>(method, `/api/v1/jobs/${id}${suffix}`);
      if (after?.id) setJob(after);
    } catch (e) {
      setError(e);
    }
  };
  if (gone) return <Alert title="This job is deleted">Nothing of it is left in the cluster. <Link href="/jobs">Back to jobs</Link></Alert>;
  if (!job) return <Loader />;
  const attempts = (job.replica_list ?? []).flatMap((r) => (r.attempts ?? []).map((a) => ({ replica: r.index, attempt: a })));
  return (
    <Stack>
      <Group justify="space-between">
        <Group>
          <Title order={2}>{job.name}</Title>
          <StateBadge state={job.state} />
          {job.simulated && <Badge color="grape" variant="outline">simulated</Badge>}
        </Group>
        <Group>
          {ended(job.state) ? <Button variant="default" onClick={() => act('POST', '/start')}>Start</Button>
            : <Button variant="default" onClick={() => act('POST', '/stop')} disabled={job.state === 'stopping'}>Stop</Button>}
          <Button color="red" variant="light" onClick={() => setConfirming(true)}>Delete</Button>
        </Group>
      </Group>
      <Failure error={error} />
      {(job.reason || job.message) && (
        <Alert color={job.state === 'failed' ? 'red' : 'blue'} title={words(job.reason || 'state')} data-testid="reason">{job.message}</Alert>
      )}
      {(job.conditions ?? []).map((c) => <Alert key={c.kind} color="yellow" title={words(c.kind)}>{c.message}</Alert>)}
      <Card withBorder>
        <Table variant="vertical" layout="fixed">
          <Table.Tbody>
            <Table.Tr><Table.Th w={180}>Id</Table.Th><Table.Td><Code>{job.id}</Code></Table.Td></Table.Tr>
            <Table.Tr><Table.Th>Kind</Table.Th><Table.Td>{kindText(job.kind)}</Table.Td></Table.Tr>
            <Table.Tr><Table.Th>GPUs</Table.Th><Table.Td>{job.gpu?.count ? `${job.gpu.count} × ${job.gpu.model}` : 'none'}</Table.Td></Table.Tr>
            <Table.Tr><Table.Th>Location</Table.Th><Table.Td>{job.location}</Table.Td></Table.Tr>
            {job.image && <Table.Tr><Table.Th>Image</Table.Th><Table.Td>{job.image}</Table.Td></Table.Tr>}
            {job.model && <Table.Tr><Table.Th>Model</Table.Th><Table.Td>{job.model} ({job.runtime}), {job.replicas} replica{job.replicas === 1 ? '' : 's'}</Table.Td></Table.Tr>}
            {job.endpoint_id && <Table.Tr><Table.Th>Endpoint</Table.Th><Table.Td><Code>{`${location.origin}/inference/e/${job.endpoint_id}/v1`}</Code></Table.Td></Table.Tr>}
            {job.kind === 'gpu_container' && <Table.Tr><Table.Th>Shell</Table.Th><Table.Td><Code>{`cosmicac jobs shell ${job.id}`}</Code></Table.Td></Table.Tr>}
          </Table.Tbody>
        </Table>
      </Card>
      {attempts.map(({ replica, attempt }) => <AttemptCard key={attempt.id} replica={replica} attempt={attempt} />)}
      <Title order={4}>History</Title>
      <Timeline bulletSize={14} lineWidth={2} active={-1}>
        {(history.data?.events ?? []).map((e) => (
          <Timeline.Item key={e.sequence} title={`${e.state}${e.reason ? ` (${words(e.reason)})` : ''}`}>
            <Text size="sm">{e.message}</Text>
            <Text size="xs" c="dimmed">{new Date(e.time).toLocaleString()}{e.actor ? ` by ${e.actor}` : ''}</Text>
          </Timeline.Item>
        ))}
      </Timeline>
      <Modal opened={confirming} onClose={() => setConfirming(false)} title={`Delete ${job.name}?`}>
        <Text mb="md">Its machines stop and its disks are removed for good.</Text>
        <Group justify="flex-end">
          <Button variant="default" onClick={() => setConfirming(false)}>Keep it</Button>
          <Button color="red" onClick={() => act('DELETE', '').then(() => go(`/jobs/${id}`))}>Delete for good</Button>
        </Group>
      </Modal>
    </Stack>
  );
}

const graphColor: Record<string, string> = { ready: 'green', failed: 'red', waiting: 'blue', creating: 'blue', pending: 'gray', deleting: 'orange', gone: 'gray' };

function AttemptCard({ replica, attempt }: { replica: number; attempt: Attempt }) {
  const nodes = attempt.nodes ?? [];
  return (
    <Card withBorder>
      <Group justify="space-between" mb="xs">
        <Text fw={600}>Replica {replica}, attempt {attempt.number} <Text span size="sm" c="dimmed">{attempt.id}</Text></Text>
        <Group gap={6}><StateBadge state={attempt.state} />{attempt.gone && <Badge variant="outline" color="gray">GPUs given back</Badge>}</Group>
      </Group>
      <Text size="sm" c="dimmed" mb="xs">{attempt.rack_id ? `rack ${attempt.rack_id}` : 'no rack yet'}{nodes.map((n) => `, ${n.gpu_count} GPUs on ${n.node_name}`).join('')}{attempt.message ? `: ${attempt.message}` : ''}</Text>
      {nodes.some((n) => (n.graph ?? []).length > 0) && (
        <Table>
          <Table.Thead><Table.Tr><Table.Th>Object</Table.Th><Table.Th>State</Table.Th><Table.Th>The cluster's words</Table.Th></Table.Tr></Table.Thead>
          <Table.Tbody>
            {nodes.flatMap((n) => (n.graph ?? []).map((g) => (
              <Table.Tr key={`${g.kind}/${g.name}`}>
                <Table.Td><Text size="sm">{g.kind}</Text><Text size="xs" c="dimmed">{g.name}</Text></Table.Td>
                <Table.Td><Badge size="sm" variant="light" color={graphColor[g.state] ?? 'gray'}>{g.state}</Badge></Table.Td>
                <Table.Td><Text size="sm">{g.message}</Text></Table.Td>
              </Table.Tr>
            )))}
          </Table.Tbody>
        </Table>
      )}
    </Card>
  );
}
