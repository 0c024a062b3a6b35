import { Button, Card, Group, NumberInput, SegmentedControl, Select, Stack, Switch, TagsInput, Text, Textarea, TextInput, Title } from '@mantine/core';
import { useQuery } from '@tanstack/react-query';
import { type FormEvent, useState } from 'react';
import { useLocation } from 'wouter';
import { APIError, type AvailableGPU, call, type Image, type Job, type Location, type Model } from './api';
import { Failure } from './parts';

const get = <T,>(path: string) => ({ queryKey: [path], queryFn: ({ signal }: { signal: AbortSignal }) => call<T>('GET', path, undefined, signal) });

export function CreateJob() {
  const [, go] = useLocation();
  const locations = useQuery(get<{ locations: Location[] | null }>('/api/v1/locations'));
  const gpus = useQuery({ ...get<{ gpus: AvailableGPU[] | null }>('/api/v1/gpus'), refetchInterval: 5000 });
  const images = useQuery(get<{ images: Image[] | null }>('/api/v1/images'));
  const models = useQuery(get<{ models: Model[] | null }>('/api/v1/models'));
  const [kind, setKind] = useState('gpu_container');
  const [name, setName] = useState('');
  const [tags, setTags] = useState<string[]>([]);
  const [location, setLocation] = useState<string | null>(null);
  const [gpu, setGPU] = useState<string | null>(null);
  const [count, setCount] = useState<number | string>(1);
  const [image, setImage] = useState<string | null>(null);
  const [disk, setDisk] = useState<number | string>(100);
  const [script, setScript] = useState('');
  const [model, setModel] = useState<string | null>(null);
  const [replicas, setReplicas] = useState<number | string>(1);
  const [authorization, setAuthorization] = useState(true);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  // One create is one key, so that a repeated click or a retry makes one job.
  const [idempotency, setIdempotency] = useState(() => randomKey());

  const here = (gpus.data?.gpus ?? []).filter((g) => !location || g.location === location);
  const free = here.find((g) => g.model === gpu);
  const field = (f: string) => (error instanceof APIError ? error.fields.find((x) => x.field === f)?.rule : undefined);
  const submit = async (e: FormEvent) => {
    e.preventDefault();
    setBusy(true);
    setError(null);
    const body: Record<string, unknown> = { kind, name, tags, location: location ?? '', gpu: { model: gpu ?? '', count: Number(count) } };
    if (kind === 'gpu_container') Object.assign(body, { image: image ?? '', disk_gib: Number(disk), ...(script ? { start_script: script } : {}) });
    else Object.assign(body, { model: model ?? '', replicas: Number(replicas), require_authorization: authorization });
    try {
      const job = await create(body, idempotency);
      go(`/jobs/${job.id}`);
    } catch (e) {
      setError(e);
      setBusy(false);
      if (e instanceof APIError && e.status >= 400 && e.status < 500) setIdempotency(randomKey());
    }
  };
  return (
    <form onSubmit={submit} noValidate>
      <Stack maw={640}>
        <Title order={2}>Create job</Title>
        <SegmentedControl value={kind} onChange={setKind} data={[{ value: 'gpu_container', label: 'GPU Container' }, { value: 'managed_inference', label: 'Managed Inference' }]} />
        <Card withBorder><Stack>
          <Title order={4}>Basics</Title>
          <TextInput label="Job name" required value={name} onChange={(e) => setName(e.currentTarget.value)} error={field('name')} />
          <TagsInput label="Tags" value={tags} onChange={setTags} error={field('tags')} />
          <Select label="Location" required data={(locations.data?.locations ?? []).map((l) => ({ value: l.code, label: l.name && l.name !== l.code ? `${l.name} (${l.code})` : l.code }))} value={location} onChange={setLocation} error={field('location')} />
        </Stack></Card>
        <Card withBorder><Stack>
          <Title order={4}>Hardware</Title>
          <Select label="GPU" required data={[...new Set(here.map((g) => g.model))]} value={gpu} onChange={setGPU} error={field('gpu.model') ?? field('gpu')} />
          <NumberInput label={kind === 'gpu_container' ? 'GPU count' : 'GPUs per replica'} required min={1} value={count} onChange={setCount} error={field('gpu.count')} />
          {free && <Text size="sm" c="dimmed" data-testid="availability">{free.offerable} of {free.total} free in {free.location}; at most {free.largest_node_offerable} on one node</Text>}
        </Stack></Card>
        {kind === 'gpu_container' ? (
          <Card withBorder><Stack>
            <Title order={4}>Image & access</Title>
            <Select label="Base OS image" required data={(images.data?.images ?? []).map((i) => i.name)} value={image} onChange={setImage} error={field('image')} />
            <NumberInput label="Disk (GB)" required min={1} value={disk} onChange={setDisk} error={field('disk_gib')} />
            <Textarea label="Start-up script" autosize minRows={2} value={script} onChange={(e) => setScript(e.currentTarget.value)} error={field('start_script')} />
          </Stack></Card>
        ) : (
          <>
            <Card withBorder><Stack>
              <Title order={4}>Model to serve</Title>
              <Select label="Model" required searchable data={(models.data?.models ?? []).map((m) => m.id)} value={model} onChange={setModel} error={field('model')} />
            </Stack></Card>
            <Card withBorder><Stack>
              <Title order={4}>Serving configuration</Title>
              <NumberInput label="Replicas" required min={1} value={replicas} onChange={setReplicas} error={field('replicas')} />
            </Stack></Card>
            <Card withBorder><Stack>
              <Title order={4}>Endpoint</Title>
              <Switch label="Require Authorization header" checked={authorization} onChange={(e) => setAuthorization(e.currentTarget.checked)} />
            </Stack></Card>
          </>
        )}
        <Failure error={error} />
        <Group><Button type="submit" loading={busy}>Create</Button><Button variant="default" onClick={() => go('/jobs')}>Cancel</Button></Group>
      </Stack>
    </form>
  );
}

function randomKey(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, '0')).join('');
}

async function create(body: unknown, key: string): Promise<Job> {
  return call<Job>('POST', '/api/v1/jobs', body, undefined, { 'Idempotency-Key': key });
}
