import { Accordion, Button, Card, Grid, Group, NumberInput, SegmentedControl, Select, Stack, Switch, TagsInput, Text, Textarea, TextInput, Title } from '@mantine/core';
import { useQuery } from '@tanstack/react-query';
import { type FormEvent, useState } from 'react';
import { useLocation } from 'wouter';
import { APIError, type AvailableGPU, call, type Image, type Job, type Location, type Model, type Plan, read } from './api';
import { money, span } from './format';
import { GPUsNow } from './GPUsNow';
import { useMe } from './me';
import { empty, type Form, requestOf } from './jobForm';
import { Outcome } from './Outcome';
import { Failure, Page } from './parts';
import { PortsToOpen, VolumesToMount } from './VolumesAndPorts';

// Which fields the folded sections hold, so that a refusal of one unfolds it.
const sections: Record<string, string[]> = {
  limits: ['idle_stop_seconds', 'max_duration_seconds', 'cost_limit_cents'],
  queue: ['placement', 'priority'],
  volumes: ['volumes'],
  ports: ['ports'],
};

export function CreateJob() {
  const [, go] = useLocation();
  const { may } = useMe();
  const locations = useQuery(read<{ locations: Location[] | null }>('/locations'));
  const gpus = useQuery({ ...read<{ gpus: AvailableGPU[] | null }>('/gpus'), refetchInterval: 5000 });
  const images = useQuery(read<{ images: Image[] | null }>('/images'));
  const models = useQuery(read<{ models: Model[] | null }>('/models'));
  const [form, setForm] = useState(empty);
  const [open, setOpen] = useState<string[]>([]);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState<'' | 'plan' | 'create'>('');
  // A plan is shown for exactly what was asked, and no longer.
  const [planned, setPlanned] = useState<{ of: string; plan: Plan } | null>(null);
  // One create is one key, so that a repeated click or a retry makes one job.
  const [idempotency, setIdempotency] = useState(randomKey);

  const change = (some: Partial<Form>) => setForm((f) => ({ ...f, ...some }));
  const body = requestOf(form);
  const asked = JSON.stringify(body);
  const all = gpus.data?.gpus ?? [];
  const here = all.filter((g) => !form.location || g.location === form.location);
  const chosen = here.find((g) => g.model === form.gpu && g.location === form.location);
  const container = form.kind === 'gpu_container';
  const field = (...names: string[]) => (error instanceof APIError ? error.fields.find((x) => names.includes(x.field))?.rule : undefined);

  const attempt = async (what: 'plan' | 'create', act: () => Promise<void>) => {
    setBusy(what);
    setError(null);
    setPlanned(null);
    try {
      await act();
    } catch (e) {
      setError(e);
      if (e instanceof APIError) {
        const folded = Object.keys(sections).filter((s) => e.fields.some((f) => sections[s]!.includes(f.field.replace(/\[.*/, ''))));
        setOpen((o) => [...new Set([...o, ...folded])]);
        if (what === 'create' && e.status >= 400 && e.status < 500) setIdempotency(randomKey());
      }
    }
    setBusy('');
  };
  const submit = (e: FormEvent) => {
    e.preventDefault();
    void attempt('create', async () => {
      const job = await call<Job>('POST', '/api/v1/jobs', body, undefined, { 'Idempotency-Key': idempotency });
      go(`/jobs/${job.id}`);
    });
  };
  const plan = () => attempt('plan', async () => setPlanned({ of: asked, plan: await call<Plan>('POST', '/api/v1/jobs/plan', body) }));
  const chooseModel = (model: string | null) => {
    const recommended = models.data?.models?.find((m) => m.id === model)?.recommended;
    change({ model, ...(recommended?.gpu_model ? { gpu: recommended.gpu_model, count: recommended.gpu_count ?? 1 } : {}) });
  };
  const price = chosen?.price_cents_per_gpu_hour;
  return (
    <Page title="Create job">
      <Grid gap="lg">
        <Grid.Col span={{ base: 12, md: 7 }} order={{ base: 2, md: 1 }}>
          <form onSubmit={submit} noValidate>
            <Stack>
              <SegmentedControl aria-label="Kind of job" value={form.kind} onChange={(kind) => change({ kind })} data={[{ value: 'gpu_container', label: 'GPU Container' }, { value: 'managed_inference', label: 'Managed Inference' }]} />
              <Card withBorder><Stack>
                <Title order={4}>Basics</Title>
                <TextInput label="Job name" required value={form.name} onChange={(e) => change({ name: e.currentTarget.value })} error={field('name')} />
                <TagsInput label="Tags" value={form.tags} onChange={(tags) => change({ tags })} error={field('tags')} />
                <Select label="Location" required data={(locations.data?.locations ?? []).map((l) => ({ value: l.code, label: l.name && l.name !== l.code ? `${l.name} (${l.code})` : l.code }))} value={form.location} onChange={(location) => change({ location })} error={field('location')} />
              </Stack></Card>
              {!container && (
                <Card withBorder><Stack>
                  <Title order={4}>Model to serve</Title>
                  <Select label="Model" required searchable data={(models.data?.models ?? []).map((m) => m.id)} value={form.model} onChange={chooseModel} error={field('model')} />
                </Stack></Card>
              )}
              <Card withBorder><Stack>
                <Title order={4}>Hardware</Title>
                <Select label="GPU" required={container} clearable={!container} data={[...new Set(here.map((g) => g.model))]} value={form.gpu} onChange={(gpu) => change({ gpu })} error={field('gpu.model', 'gpu')} />
                <NumberInput label={container ? 'GPU count' : 'GPUs per replica'} required min={container ? 1 : 0} value={form.count} onChange={(count) => change({ count })} error={field('gpu.count')} />
              </Stack></Card>
              {container ? (
                <Card withBorder><Stack>
                  <Title order={4}>Image & access</Title>
                  <Select label="Base OS image" required data={(images.data?.images ?? []).map((i) => i.name)} value={form.image} onChange={(image) => change({ image })} error={field('image')} />
                  <NumberInput label="Disk (GB)" required min={1} value={form.disk} onChange={(disk) => change({ disk })} error={field('disk_gib')} />
                  <Textarea label="Start-up script" autosize minRows={2} value={form.script} onChange={(e) => change({ script: e.currentTarget.value })} error={field('start_script')} />
                </Stack></Card>
              ) : (
                <>
                  <Card withBorder><Stack>
                    <Title order={4}>Serving configuration</Title>
                    <NumberInput label="Replicas" required min={1} value={form.replicas} onChange={(replicas) => change({ replicas })} error={field('replicas')} />
                  </Stack></Card>
                  <Card withBorder><Stack>
                    <Title order={4}>Endpoint</Title>
                    <Switch label="Require Authorization header" checked={form.authorization} onChange={(e) => change({ authorization: e.currentTarget.checked })} />
                  </Stack></Card>
                </>
              )}
              <Accordion multiple variant="contained" order={4} value={open} onChange={setOpen}>
                {container && (
                  <Accordion.Item value="volumes">
                    <Accordion.Control>Volumes <Text span size="sm" c="dimmed">{form.volumes.map((v) => v.volume).filter(Boolean).join(', ') || 'none'}</Text></Accordion.Control>
                    <Accordion.Panel><VolumesToMount rows={form.volumes} change={(volumes) => change({ volumes })} location={form.location} field={field} /></Accordion.Panel>
                  </Accordion.Item>
                )}
                {container && (
                  <Accordion.Item value="ports">
                    <Accordion.Control>Public ports <Text span size="sm" c="dimmed">{form.ports.map((p) => p.port).filter((p) => p !== '').join(', ') || 'none'}</Text></Accordion.Control>
                    <Accordion.Panel><PortsToOpen rows={form.ports} change={(ports) => change({ ports })} field={field} /></Accordion.Panel>
                  </Accordion.Item>
                )}
                <Accordion.Item value="limits">
                  <Accordion.Control>Limits <Text span size="sm" c="dimmed">{limitsOf(form, chosen?.currency ?? '')}</Text></Accordion.Control>
                  <Accordion.Panel><Stack>
                    {container && <NumberInput label="Stop when idle for (minutes)" description="Idle: no GPU use and no shell. The disk is kept." min={0} value={form.idleMinutes} onChange={(idleMinutes) => change({ idleMinutes })} error={field('idle_stop_seconds')} />}
                    <NumberInput label="Stop after running for (hours)" min={0} decimalScale={2} value={form.hours} onChange={(hours) => change({ hours })} error={field('max_duration_seconds')} />
                    <NumberInput label={`Stop at a cost of${chosen?.currency ? ` (${chosen.currency})` : ''}`} min={0} decimalScale={2} value={form.cost} onChange={(cost) => change({ cost })} error={field('cost_limit_cents')}
                      description={price == null ? 'Needs a price of the GPU model; none is known of this one.' : `${money(price, chosen!.currency)} for a GPU and hour`} disabled={price == null && form.cost === ''} />
                  </Stack></Accordion.Panel>
                </Accordion.Item>
                <Accordion.Item value="queue">
                  <Accordion.Control>Placement and queue <Text span size="sm" c="dimmed">{form.placement === 'pack' ? 'packed' : 'spread'}, priority {Number(form.priority)}</Text></Accordion.Control>
                  <Accordion.Panel><Stack>
                    <Select label="Placement" description="Pack fills nodes up and leaves others whole; spread keeps replicas apart." data={[{ value: 'pack', label: 'Pack' }, { value: 'spread', label: 'Spread' }]} allowDeselect={false} value={form.placement} onChange={(placement) => change({ placement: placement ?? 'pack' })} error={field('placement')} />
                    <NumberInput label="Priority" description={may('admin') ? 'Higher goes first in the queue: -100 to 100. Above 0 puts everybody else back.' : 'Higher goes first in the queue: -100 to 0. An administrator may give more.'} min={-100} max={may('admin') ? 100 : 0} allowDecimal={false} value={form.priority} onChange={(priority) => change({ priority })} error={field('priority')} />
                  </Stack></Accordion.Panel>
                </Accordion.Item>
              </Accordion>
              <Failure error={error} />
              {planned?.of === asked && <Outcome plan={planned.plan} />}
              <Group>
                <Button type="submit" loading={busy === 'create'} disabled={busy === 'plan'}>Create</Button>
                <Button variant="light" onClick={plan} loading={busy === 'plan'} disabled={busy === 'create'}>What would happen?</Button>
                <Button variant="default" onClick={() => go('/jobs')}>Cancel</Button>
              </Group>
            </Stack>
          </form>
        </Grid.Col>
        <Grid.Col span={{ base: 12, md: 5 }} order={{ base: 1, md: 2 }}>
          <GPUsNow gpus={gpus.data?.gpus} error={gpus.error} location={form.location} model={form.gpu} choose={(g) => change({ gpu: g.model, location: g.location })} />
        </Grid.Col>
      </Grid>
    </Page>
  );
}

function limitsOf(f: Form, currency: string): string {
  const set = [
    f.kind === 'gpu_container' && f.idleMinutes !== '' && `idle ${span(Number(f.idleMinutes) * 60)}`,
    f.hours !== '' && `running ${span(Number(f.hours) * 3600)}`,
    f.cost !== '' && money(Number(f.cost) * 100, currency),
  ].filter(Boolean);
  return set.length > 0 ? set.join(', ') : 'none';
}

function randomKey(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, '0')).join('');
}
