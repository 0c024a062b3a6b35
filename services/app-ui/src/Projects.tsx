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
      <Text c="dimmed">A project's quota is how many GPUs its jobs may hold at once. Jobs above it wait.</Text>
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
  const [most, setMost] = useState<number | string>('');
  const [unlimited, setUnlimited] = useState(true);
  const { maximum_gpus: maximum, held_gpus: held, admitted } = project.quota;
  const open = () => {
    setUnlimited(maximum === null);
    setMost(maximum ?? '');
    setAsking(true);
  };
  const save = async () => {
    await call('PUT', `/api/v1/projects/${project.id}/quota`, { maximum_gpus: unlimited ? null : Number(most) });
    await queries.invalidateQueries({ queryKey: ['projects'] });
  };
  const use = held == null ? 'The orchestrator does not say now what it holds' : `${plural(held, 'GPU')} held`;
  return (
    <Card withBorder component="section" aria-label={`Project of ${(project.members ?? []).join(', ')}`} data-testid={`project-${project.id}`}>
      <Group justify="space-between" wrap="nowrap" align="flex-start">
        <div style={{ minWidth: 0 }}>
          <Text fw={600} style={{ overflowWrap: 'anywhere' }}>{(project.members ?? []).join(', ')}</Text>
          <Text size="xs" c="dimmed">{project.name}, {project.id}</Text>
        </div>
        {admin && <Button size="xs" variant="default" onClick={open}>Quota…</Button>}
      </Group>
      {maximum !== null && <Progress mt="sm" value={maximum > 0 ? Math.min(100, (100 * (held ?? 0)) / maximum) : 100} color={(held ?? 0) >= maximum ? 'red' : 'indigo'} aria-label={`${held ?? 'unknown'} of ${maximum} GPUs held`} />}
      <Text size="sm" mt="xs">{use}{maximum === null ? ', no quota' : ` of ${maximum}`}</Text>
      {maximum !== null && held != null && !admitted && <Badge mt={4} color="yellow" variant="light">not yet in force</Badge>}
      <Ask opened={asking} onClose={() => setAsking(false)} title="GPU quota" yes="Set it" incomplete={!unlimited && most === ''} onYes={save}>
        <Text size="sm">How many GPUs the jobs of {(project.members ?? []).join(', ')} may hold at once. A lower quota ends nothing: what runs goes on, and what comes waits.</Text>
        <Checkbox label="No quota" checked={unlimited} onChange={(e) => setUnlimited(e.currentTarget.checked)} />
        {!unlimited && <NumberInput label="GPUs at once" min={0} max={4_294_967_295} allowDecimal={false} value={most} onChange={setMost} data-autofocus />}
      </Ask>
    </Card>
  );
}
