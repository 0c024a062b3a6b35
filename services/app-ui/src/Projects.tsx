import { Badge, Button, Card, Checkbox, Group, NumberInput, Progress, SimpleGrid, Text } from '@mantine/core';
import { useInfiniteQuery, useQueryClient } from '@tanstack/react-query';
import { useState } from 'react';
import { Ask } from './Ask';
import { call, type Project } from './api';
import { plural } from './format';
import { useMe } from './me';
import { Failure, Loading, Page } from './parts';

interface List { projects: Project[] | null; next_page_token: string }

export function Projects() {
  const { may } = useMe();
  const pages = useInfiniteQuery({
    queryKey: ['projects'], initialPageParam: '', refetchInterval: 5000,
    queryFn: ({ pageParam, signal }) => call<List>('GET', `/api/v1/projects?${new URLSearchParams({ page_token: pageParam })}`, undefined, signal),
    getNextPageParam: (last) => last.next_page_token || undefined,
  });
  const projects = (pages.data?.pages ?? []).flatMap((p) => p.projects ?? []);
  return (
    <Page title="Projects">
      <Text c="dimmed">A project's quota is how many GPUs its jobs may hold at once, and how much its volumes together. Jobs above it wait; volumes above it are refused.</Text>
      <Failure error={pages.error} />
      {pages.isPending && <Loading />}
      {pages.isSuccess && projects.length === 0 && <Text>You belong to no project.</Text>}
      <SimpleGrid cols={{ base: 1, sm: 2, lg: 3 }}>{projects.map((p) => <ProjectCard key={p.id} project={p} admin={may('admin')} />)}</SimpleGrid>
      {pages.hasNextPage && <Group><Button variant="default" onClick={() => pages.fetchNextPage()} loading={pages.isFetchingNextPage}>Show more</Button></Group>}
    </Page>
  );
}

function ProjectCard({ project, admin }: { project: Project; admin: boolean }) {
  const queries = useQueryClient();
  const [asking, setAsking] = useState(false);
  const [gpus, setGPUs] = useState<Bound>({ none: true, most: '' });
  const [gib, setGiB] = useState<Bound>({ none: true, most: '' });
  const { maximum_gpus: gpusAtMost, held_gpus: gpusHeld, maximum_volume_gib: gibAtMost, held_volume_gib: gibHeld, admitted } = project.quota;
  const who = (project.members ?? []).join(', ');
  const open = () => {
    setGPUs({ none: gpusAtMost === null, most: gpusAtMost ?? '' });
    setGiB({ none: gibAtMost === null, most: gibAtMost ?? '' });
    setAsking(true);
  };
  const value = (b: Bound) => (b.none ? null : Number(b.most));
  const save = async () => {
    await call('PUT', `/api/v1/projects/${project.id}/quota`, { maximum_gpus: value(gpus), maximum_volume_gib: value(gib) });
    await queries.invalidateQueries({ queryKey: ['projects'] });
  };
  return (
    <Card withBorder component="section" aria-label={`Project of ${who}`} data-testid={`project-${project.id}`}>
      <Group justify="space-between" wrap="nowrap" align="flex-start">
        <div style={{ minWidth: 0 }}>
          <Text fw={600} style={{ overflowWrap: 'anywhere' }}>{who}</Text>
          <Text size="xs" c="dimmed">{project.name}, {project.id}</Text>
        </div>
        {admin && <Button size="xs" variant="default" onClick={open}>Quota…</Button>}
      </Group>
      {gpusHeld == null && <Text size="sm" mt="sm">The orchestrator does not say now what it holds.</Text>}
      <Use what="GPUs" held={gpusHeld} most={gpusAtMost} text={(n) => plural(n, 'GPU')} />
      <Use what="GiB of volumes" held={gibHeld} most={gibAtMost} text={(n) => `${n} GiB of volumes`} />
      {(gpusAtMost !== null || gibAtMost !== null) && gpusHeld != null && !admitted && <Badge mt={4} color="yellow" variant="light">not yet in force</Badge>}
      <Ask opened={asking} onClose={() => setAsking(false)} title={`Quota of ${who}`} yes="Set it" incomplete={[gpus, gib].some((b) => !b.none && b.most === '')} onYes={save}>
        <Text size="sm">A lower quota ends nothing: what runs goes on, volumes stay, and what comes waits or is refused.</Text>
        <Limit none="No bound of GPUs" label="GPUs at once" bound={gpus} change={setGPUs} />
        <Limit none="No bound of volumes" label="Volumes together (GiB)" bound={gib} change={setGiB} />
      </Ask>
    </Card>
  );
}

interface Bound { none: boolean; most: number | string }

function Limit({ none, label, bound, change }: { none: string; label: string; bound: Bound; change: (bound: Bound) => void }) {
  return (
    <>
      <Checkbox label={none} checked={bound.none} onChange={(e) => change({ ...bound, none: e.currentTarget.checked })} />
      {!bound.none && <NumberInput label={label} min={0} max={4_294_967_295} allowDecimal={false} value={bound.most} onChange={(most) => change({ ...bound, most })} />}
    </>
  );
}

/** How much of a bound is used, or what is held without one. */
function Use({ what, held, most, text }: { what: string; held?: number | null; most: number | null; text: (n: number) => string }) {
  if (held == null && most === null) return null;
  return (
    <>
      {most !== null && <Progress mt="sm" value={most > 0 ? Math.min(100, (100 * (held ?? 0)) / most) : 100} color={(held ?? 0) >= most ? 'red' : 'indigo'} aria-label={`${held ?? 'unknown'} of ${most} ${what} held`} />}
      <Text size="sm" mt="xs">{held == null ? `At most ${text(most!)}` : `${text(held)} held${most === null ? ', no quota' : ` of ${most}`}`}</Text>
    </>
  );
}
