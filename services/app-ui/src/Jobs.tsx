import { Badge, Button, Group, Loader, Table, Text, Title } from '@mantine/core';
import { useQuery } from '@tanstack/react-query';
import { Link, useLocation } from 'wouter';
import { call, type Job } from './api';
import { ago, Failure, kindText, StateBadge, words } from './parts';

export function Jobs() {
  const [, go] = useLocation();
  const jobs = useQuery({ queryKey: ['jobs'], queryFn: ({ signal }) => call<{ jobs: Job[] | null }>('GET', '/api/v1/jobs', undefined, signal), refetchInterval: 2000 });
  const list = jobs.data?.jobs ?? [];
  return (
    <>
      <Group justify="space-between" mb="md">
        <Title order={2}>Jobs</Title>
        <Button component={Link} href="/jobs/new">Create job</Button>
      </Group>
      <Failure error={jobs.error} />
      {jobs.isPending && <Loader />}
      {jobs.isSuccess && list.length === 0 && <Text c="dimmed">You have no jobs. Create one to get a machine with GPUs, or a model behind an API.</Text>}
      {list.length > 0 && (
        <Table.ScrollContainer minWidth={720}>
          <Table highlightOnHover>
            <Table.Thead><Table.Tr><Table.Th>Name</Table.Th><Table.Th>Kind</Table.Th><Table.Th>State</Table.Th><Table.Th>Why</Table.Th><Table.Th>GPUs</Table.Th><Table.Th>Location</Table.Th><Table.Th>Created</Table.Th></Table.Tr></Table.Thead>
            <Table.Tbody>
              {list.map((j) => (
                <Table.Tr key={j.id} onClick={() => go(`/jobs/${j.id}`)} style={{ cursor: 'pointer' }} data-testid={`job-${j.name}`}>
                  <Table.Td><Link href={`/jobs/${j.id}`} onClick={(e) => e.stopPropagation()}>{j.name}</Link></Table.Td>
                  <Table.Td>{kindText(j.kind)}</Table.Td>
                  <Table.Td>
                    <Group gap={4}><StateBadge state={j.state} />{(j.conditions ?? []).map((c) => <Badge key={c.kind} color="yellow" variant="outline">{words(c.kind)}</Badge>)}</Group>
                  </Table.Td>
                  <Table.Td><Text size="sm" c="dimmed" lineClamp={2}>{j.reason ? words(j.reason) : ''}</Text></Table.Td>
                  <Table.Td>{j.gpu?.count ? `${j.gpu.count} × ${j.gpu.model}` : '–'}</Table.Td>
                  <Table.Td>{j.location}</Table.Td>
                  <Table.Td>{ago(j.created_at)}</Table.Td>
                </Table.Tr>
              ))}
            </Table.Tbody>
          </Table>
        </Table.ScrollContainer>
      )}
    </>
  );
}
