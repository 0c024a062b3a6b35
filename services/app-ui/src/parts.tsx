// Small parts that several pages share: a state's badge, a failed call, an age.
import { Alert, Badge, List } from '@mantine/core';
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

export function Failure({ error }: { error: unknown }) {
  if (!error) return null;
  const e = error as APIError;
  return (
    <Alert color="red" title={e.message} role="alert" my="sm">
      {e instanceof APIError && e.fields.length > 0 && (
        <List size="sm">{e.fields.map((f, i) => <List.Item key={i}><b>{f.field}</b>: {f.rule}</List.Item>)}</List>
      )}
    </Alert>
  );
}

export function ago(time?: string | null): string {
  if (!time) return '–';
  const s = Math.max(0, (Date.now() - new Date(time).getTime()) / 1000);
  if (s < 120) return `${Math.floor(s)} s ago`;
  if (s < 7200) return `${Math.floor(s / 60)} min ago`;
  if (s < 172_800) return `${Math.floor(s / 3600)} h ago`;
  return `${Math.floor(s / 86_400)} days ago`;
}

export const kindText = (kind: string) => (kind === 'managed_inference' ? 'Managed Inference' : 'GPU Container');
