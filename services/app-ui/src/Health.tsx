import { Alert, Text } from '@mantine/core';
import { useQuery } from '@tanstack/react-query';
import { read, type Warning } from './api';
import { Failure, Loading, Page } from './parts';

export function Health() {
  const health = useQuery({ ...read<{ warnings: Warning[] | null }>('/health'), refetchInterval: 5000 });
  const warnings = health.data?.warnings ?? [];
  return (
    <Page title="Health">
      <Failure error={health.error} />
      {health.isPending && <Loading />}
      {health.isSuccess && warnings.length === 0 && <Alert color="green" title="Every daemon answers and reports nothing wrong" />}
      {warnings.map((w) => (
        <Alert key={`${w.daemon}/${w.code}`} color={w.severity === 'error' ? 'red' : w.severity === 'warning' ? 'yellow' : 'blue'} title={`${w.daemon}: ${w.text}`}>
          <Text size="sm">{w.remedy}</Text>
          <Text size="xs" c="dimmed">{w.code}</Text>
        </Alert>
      ))}
    </Page>
  );
}
