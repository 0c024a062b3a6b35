// What may be done with a job. Each act says first what it takes away and what it keeps.
import { Button, Group, List, Text } from '@mantine/core';
import { useState } from 'react';
import { Ask } from './Ask';
import { call, ended, type Job } from './api';
import { ChangeJob } from './ChangeJob';
import { plural } from './format';
import { useMe } from './me';

type Act = 'stop' | 'start' | 'restart' | 'delete';

export function JobActions({ job, changed }: { job: Job; changed: (job: Job) => void }) {
  const { may } = useMe();
  const [asking, setAsking] = useState<Act | null>(null);
  if (!may('jobs:write')) return null;
  const close = () => setAsking(null);
  const act = (what: Act) => async () => {
    const after = await call<Job>(what === 'delete' ? 'DELETE' : 'POST', `/api/v1/jobs/${job.id}${what === 'delete' ? '' : `/${what}`}`);
    changed(after);
  };
  const over = ended(job.state);
  const disks = job.disk_gib > 0 ? `${job.replicas > 1 ? 'root disks' : 'root disk'} (${job.disk_gib} GB${job.replicas > 1 ? ' each' : ''})` : 'root disks';
  const gpus = (job.gpu?.count ?? 0) * job.replicas;
  const model = job.kind === 'managed_inference';
  // A disk that somebody removed in the cluster goes with its machine.
  const lost = (job.conditions ?? []).some((c) => c.kind === 'disk_lost');
  const attempts = (job.replica_list ?? []).flatMap((r) => r.attempts ?? []);
  const placed = attempts.some((a) => a.claimed_at && !a.gone);
  const started = attempts.some((a) => a.claimed_at);
  const lostDisk = lost ? [`the ${disks}: somebody removed it in the cluster, and what is on it goes with the machine`] : [];
  const keptDisk = lost || !started ? [] : [`the ${disks}, with everything on it`];
  return (
    <Group gap="xs">
      {model && !over && job.state !== 'stopping' && <ChangeJob job={job} changed={changed} />}
      {over ? <Button variant="default" onClick={() => setAsking('start')}>Start again</Button> : (
        <>
          <Button variant="default" onClick={() => setAsking('stop')} disabled={job.state === 'stopping'}>Stop</Button>
          {placed && <Button variant="default" onClick={() => setAsking('restart')} disabled={job.state === 'stopping'}>Restart</Button>}
        </>
      )}
      <Button color="red" variant="light" onClick={() => setAsking('delete')}>Delete</Button>

      <Ask opened={asking === 'stop'} onClose={close} title={`Stop ${job.name}?`} yes="Stop it" no="Let it run" danger onYes={act('stop')}>
        <Kept gone={!placed ? ['its place in the queue'] : [
          gpus > 0 ? `${gpus === 1 ? 'its GPU goes' : `its ${gpus} GPUs go`} to whoever is next` : 'its machines end',
          model ? 'requests under way are finished if they can be, and its endpoint answers no more' : 'open shells close, and what is in memory is lost',
          ...lostDisk,
        ]} kept={[...keptDisk, 'the job itself: start it again whenever GPUs are free']} />
      </Ask>
      <Ask opened={asking === 'restart'} onClose={close} title={`Restart ${job.name}?`} yes="Restart it" no="Let it run" danger onYes={act('restart')}>
        <Kept gone={[
          model ? 'its endpoint answers no more until a new attempt runs' : 'open shells close, and what is in memory is lost',
          gpus > 0 ? 'its GPUs are given back first: it may wait if others are before it' : 'its machines end and are made anew',
          ...lostDisk,
        ]} kept={[...keptDisk, 'the job itself, its name and its history']} />
      </Ask>
      <Ask opened={asking === 'start'} onClose={close} title={`Start ${job.name} again?`} yes="Start it" onYes={act('start')}>
        <Text size="sm">A new attempt is made on the same disk{gpus > 0 ? `, as soon as ${plural(gpus, 'GPU')} can be had` : ''}.</Text>
      </Ask>
      <Ask opened={asking === 'delete'} onClose={close} title={`Delete ${job.name}?`} yes="Delete for good" no="Keep it" danger onYes={act('delete')}>
        <Kept gone={[over ? 'nothing of it runs any more' : 'its machines stop', ...(started ? [`the ${disks} and everything on it are removed for good: no way back`] : []), ...(model ? ['its endpoint is gone'] : [])]} kept={model ? ['what was used, in the usage of the API keys'] : []} />
      </Ask>
    </Group>
  );
}

function Kept({ gone, kept }: { gone: string[]; kept: string[] }) {
  return (
    <>
      <div><Text fw={600} size="sm">What goes</Text><List size="sm">{gone.map((x) => <List.Item key={x}>{x}</List.Item>)}</List></div>
      {kept.length > 0 && <div><Text fw={600} size="sm">What stays</Text><List size="sm">{kept.map((x) => <List.Item key={x}>{x}</List.Item>)}</List></div>}
    </>
  );
}
