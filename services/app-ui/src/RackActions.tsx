// What an administrator may do with a rack: close it, empty it, remove it.
import { ActionIcon, Checkbox, List, Menu, NumberInput, Stack, Text } from '@mantine/core';
import { IconDots } from '@tabler/icons-react';
import { useQueryClient } from '@tanstack/react-query';
import { useState } from 'react';
import { Ask } from './Ask';
import { call, type Rack } from './api';
import { plural, when } from './format';
import { Failure } from './parts';

export function RackActions({ rack }: { rack: Rack }) {
  const queries = useQueryClient();
  const [asking, ask] = useState<'drain' | 'forget' | null>(null);
  const [hours, setHours] = useState<number | string>(1);
  const [force, setForce] = useState(false);
  const [told, setTold] = useState<number | null>(null);
  const [error, setError] = useState<unknown>(null);
  const path = `/api/v1/racks/${encodeURIComponent(rack.id)}`;
  const attempts = new Set((rack.nodes ?? []).flatMap((n) => (n.gpus ?? []).flatMap((g) => Object.keys(g.holders ?? {})))).size;
  const again = () => Promise.all(['/racks', '/forgotten-racks', '/gpus'].map((key) => queries.invalidateQueries({ queryKey: [key] })));
  const open = (what: 'drain' | 'forget') => { setForce(false); setTold(null); ask(what); };
  const cordon = async (cordoned: boolean) => {
    setError(null);
    setTold(null);
    try {
      await call('POST', `${path}/cordon`, { cordoned });
      await again();
    } catch (e) {
      setError(e);
    }
  };
  const drain = async () => {
    const answer = await call<{ jobs: number }>('POST', `${path}/drain`, { deadline_seconds: Math.round(Number(hours) * 3600) });
    setTold(answer.jobs);
    await again();
  };
  const forget = async () => {
    await call('DELETE', path + (force ? `?${new URLSearchParams({ force: 'true', confirm: rack.id })}` : ''));
    await again();
  };
  return (
    <Stack gap="xs" align="flex-end">
      <Menu position="bottom-end">
        <Menu.Target><ActionIcon variant="default" aria-label={`Actions for rack ${rack.id}`}><IconDots size={18} aria-hidden /></ActionIcon></Menu.Target>
        <Menu.Dropdown>
          {rack.cordoned ? <Menu.Item onClick={() => cordon(false)}>Uncordon</Menu.Item> : <Menu.Item onClick={() => cordon(true)}>Cordon</Menu.Item>}
          <Menu.Item onClick={() => open('drain')}>Drain…</Menu.Item>
          <Menu.Divider />
          <Menu.Item color="red" onClick={() => open('forget')}>Forget…</Menu.Item>
        </Menu.Dropdown>
      </Menu>
      <Failure error={error} />
      {told !== null && <Text size="sm" role="status">The owners of {plural(told, 'job')} are told.</Text>}

      <Ask opened={asking === 'drain'} onClose={() => ask(null)} title={`Drain rack ${rack.id}?`} yes="Drain it" danger incomplete={hours === ''} onYes={drain}>
        <NumberInput label="Deadline (hours from now)" description={hours === '' ? undefined : `at ${when(Date.now() + Number(hours) * 3_600_000)}; 0 stops at once`} min={0} max={720} decimalScale={2} value={hours} onChange={setHours} data-autofocus />
        <List size="sm">
          <List.Item>No new work is placed here from now on.</List.Item>
          <List.Item>{attempts > 0 ? `The owners of what runs here (${plural(attempts, 'attempt')}) are told now, on their job's page.` : 'Nothing holds a GPU here now.'}</List.Item>
          <List.Item>At the deadline containers are stopped: open shells and memory are lost, disks stay. Inference replicas move to other racks.</List.Item>
          <List.Item>Until then Uncordon takes it back.</List.Item>
        </List>
      </Ask>
      <Ask opened={asking === 'forget'} onClose={() => ask(null)} title={`Forget rack ${rack.id}?`} yes="Forget it" no="Keep it" danger typed={force ? rack.id : undefined} onYes={forget}>
        <Text size="sm">Its entry is removed, and no work is placed on it. It is refused while jobs run there or keep their disks there.</Text>
        <Checkbox label="By force" description="What runs there is abandoned: not stopped, not seen any more, and its GPUs are lost to you until the rack is registered again. It stays listed under forgotten racks." checked={force} onChange={(e) => setForce(e.currentTarget.checked)} />
      </Ask>
    </Stack>
  );
}
