// What would become of a job now: the plan, or every reason why there is none.
import { Alert, List, Stack, Text } from '@mantine/core';
import type { Plan, PlanRefusal } from './api';
import { plural } from './format';
import { Explanation, words } from './parts';

const verdicts = {
  starts: { color: 'green', title: 'It would start now' },
  waits: { color: 'yellow', title: 'It would wait' },
  never: { color: 'red', title: 'It could never start as it is' },
};

export function Outcome({ plan }: { plan: Plan }) {
  const verdict = verdicts[plan.fits ? 'starts' : plan.state === 'failed' ? 'never' : 'waits'];
  const reason = plan.replicas.find((r) => r.refusals.length > 0)?.refusals[0];
  return (
    <Alert color={verdict.color} title={`${verdict.title}${reason ? `: ${words(reason.reason)}` : ''}`} role="status" data-testid="outcome">
      <Stack gap="xs">
        {reason && <Explanation reason={reason.reason} message={reason.message} />}
        {plan.replicas.map((r) => (
          <div key={r.index}>
            {plan.replicas.length > 1 && <Text size="sm" fw={600}>Replica {r.index}</Text>}
            {r.nodes.length > 0 && <Text size="sm">Rack {r.rack_id}: {r.nodes.map((n) => (n.gpu_count > 0 ? `${plural(n.gpu_count, 'GPU')} on ${n.name}` : n.name)).join(', ')}</Text>}
            <Racks refusals={r.refusals.filter((x) => x.rack_id !== '')} />
          </div>
        ))}
        <Text size="xs" c="dimmed">As of now, behind everybody who waits. Nothing is kept for you until the job is created.</Text>
      </Stack>
    </Alert>
  );
}

function Racks({ refusals }: { refusals: PlanRefusal[] }) {
  if (refusals.length === 0) return null;
  return <List size="sm">{refusals.map((x, i) => <List.Item key={i}>Rack {x.rack_id}, {words(x.reason)}: {x.message}</List.Item>)}</List>;
}
