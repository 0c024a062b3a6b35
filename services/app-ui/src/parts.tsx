// Small parts that several pages share: a state's badge, a failed call, a page's
// title, what is shown while nothing is there.
import { Alert, Badge, Center, Group, List, Loader, Stack, Text, Title } from '@mantine/core';
import { useDocumentTitle } from '@mantine/hooks';
import { type ReactNode, useEffect, useState } from 'react';
import { APIError } from './api';
import { conditions, reasons, states } from './words';

const colors: Record<string, string> = {
  queued: 'gray', reserving: 'blue', provisioning: 'blue', starting: 'cyan', running: 'green', stopping: 'orange',
  stopped: 'gray', succeeded: 'teal', failed: 'red', cancelled: 'gray',
};

export function StateBadge({ state }: { state: string }) {
  return <Badge color={colors[state] ?? 'gray'} variant="light" data-testid="state" title={states[state]?.means}>{states[state]?.label ?? state}</Badge>;
}

/** A reason or a condition in words: "never_fits" reads "never fits". A newer daemon's code reads as it is. */
export const words = (code: string) => (reasons[code] ?? conditions[code])?.label ?? code.replaceAll('_', ' ');

/** What a reason or a condition means, the daemon's own message, and what helps. */
export function Explanation({ reason, condition, message }: { reason?: string; condition?: string; message: string }) {
  const entry = reasons[reason ?? ''] ?? conditions[condition ?? ''];
  return (
    <Stack gap={4}>
      {entry && <Text size="sm">{sentence(entry.means)}</Text>}
      {message && <Text size="sm" fw={500} style={{ overflowWrap: 'anywhere' }}>{message}</Text>}
      {entry && !entry.remedy.startsWith('nothing') && <Text size="sm">What helps: {entry.remedy}.</Text>}
    </Stack>
  );
}

export const sentence = (text: string) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

export function Failure({ error }: { error: unknown }) {
  if (!error) return null;
  const fields = error instanceof APIError ? error.fields : [];
  return (
    <Alert color="red" title={(error as Error).message} role="alert">
      {fields.length > 0 && <List size="sm">{fields.map((f, i) => <List.Item key={i}><b>{f.field}</b>: {f.rule}</List.Item>)}</List>}
    </Alert>
  );
}

export function Loading() {
  return <Center py="xl"><Loader aria-label="Loading" role="status" /></Center>;
}

export function Page({ title, actions, children }: { title: string; actions?: ReactNode; children: ReactNode }) {
  useDocumentTitle(`${title} · CosmicAC`);
  return (
    <Stack maw={1280} mx="auto">
      <Group justify="space-between"><Title order={2}>{title}</Title>{actions}</Group>
      {children}
    </Stack>
  );
}

/** This computer's time, told again every so many milliseconds. */
export function useNow(every = 1000): number {
  const [now, tell] = useState(Date.now);
  useEffect(() => {
    const timer = setInterval(() => tell(Date.now()), every);
    return () => clearInterval(timer);
  }, [every]);
  return now;
}

export const kindText = (kind: string) => (kind === 'managed_inference' ? 'Managed Inference' : 'GPU Container');
