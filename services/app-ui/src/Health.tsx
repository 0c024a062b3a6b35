import { Alert, Loader, Stack, Text, Title } from '@mantine/core';
import { useQuery } from '@tanstack/react-query';
import { call, type Warning } from './api';
import { Failure } from './parts';

export function Health() {
  const health = useQuery({ queryKey: ['health'], queryFn: ({ signal }) => call<{ warnings: Warning[] | null }>('GET', '/api/v1/health', undefined, signal), refetchInterval: 5000 });
  const warnings = health.data?.warnings ?? [];
  return (
    <Stack>
      <Title order={2}>Health</Title>
      <Failure error={health.error} />
      {health.isPending && <Loader />}
      {health.isSuccess && warnings.length === 0 && <Alert color="green" title="Every daemon answers and reports nothing wrong" />}
      {warnings.map((w) => (
        <Alert key={`${w.daemon}/${w.code}`} color={w.severity === 'error' ? 'red' : w.severity === 'warning' ? 'yellow' : 'blue'} title={`${w.daemon}: ${w.text}`}>
          <Text size="sm">{w.remedy}</Text>
          <Text size="xs" c="dimmed">{w.code}</Text>
        </Alert>
      ))}
    </Stack>
  );
}
