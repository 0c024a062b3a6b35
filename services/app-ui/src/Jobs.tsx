import { Badge, Button, Group, Table, Text } from '@mantine/core';
import { useQuery } from '@tanstack/react-query';
import { Link, useLocation } from 'wouter';
import { type Job, read } from './api';
import { ago } from './format';
import { useMe } from './me';
import { Failure, kindText, Loading, Page, StateBadge, words } from './parts';

export function Jobs() {
  const [, go] = useLocation();
  const { may } = useMe();
  const jobs = useQuery({ ...read<{ jobs: Job[] | null }>('/jobs'), refetchInterval: 2000 });
  const list = jobs.data?.jobs ?? [];
  return (
    <Page title="Jobs" actions={may('jobs:write') && <Button component={Link} href="/jobs/new">Create job</Button>}>
      <Failure error={jobs.error} />
      {jobs.isPending && <Loading />}
      {jobs.isSuccess && list.length === 0 && <Text c="dimmed">You have no jobs. Create one to get a machine with GPUs, or a model behind an API.</Text>}
      {list.length > 0 && (
        <Table highlightOnHover>
          <Table.Thead>
            <Table.Tr>
              <Table.Th>Name</Table.Th><Table.Th visibleFrom="md">Kind</Table.Th><Table.Th>State</Table.Th><Table.Th visibleFrom="sm">GPUs</Table.Th>
              <Table.Th visibleFrom="sm">Location</Table.Th><Table.Th visibleFrom="md">Created</Table.Th>
            </Table.Tr>
          </Table.Thead>
          <Table.Tbody>
            {list.map((j) => (
              <Table.Tr key={j.id} onClick={() => go(`/jobs/${j.id}`)} style={{ cursor: 'pointer' }} data-testid={`job-${j.name}`}>
                <Table.Td style={{ overflowWrap: 'anywhere' }}><Link href={`/jobs/${j.id}`} onClick={(e) => e.stopPropagation()}>{j.name}</Link></Table.Td>
                <Table.Td visibleFrom="md">{kindText(j.kind)}</Table.Td>
                <Table.Td>
                  <Group gap={4}><StateBadge state={j.state} />{(j.conditions ?? []).map((c) => <Badge key={c.kind} color="yellow" variant="outline">{words(c.kind)}</Badge>)}</Group>
                  {j.reason && <Text size="xs" c="dimmed" mt={2} lineClamp={2} title={j.message}>{words(j.reason)}</Text>}
                </Table.Td>
                <Table.Td visibleFrom="sm">{j.gpu?.count ? `${j.gpu.count} × ${j.gpu.model}` : '–'}</Table.Td>
                <Table.Td visibleFrom="sm">{j.location}</Table.Td>
                <Table.Td visibleFrom="md">{ago(j.created_at)}</Table.Td>
              </Table.Tr>
            ))}
          </Table.Tbody>
        </Table>
      )}
    </Page>
  );
}
