import { Badge, Button, Checkbox, Code, CopyButton, Modal, Stack, Table, Text, TextInput } from '@mantine/core';
import { useQuery, useQueryClient } from '@tanstack/react-query';
import { type FormEvent, useState } from 'react';
import { Ask } from './Ask';
import { type APIKey, call, type UsageBucket } from './api';
import { ago } from './format';
import { Failure, Loading, Page } from './parts';

export function Keys() {
  const queries = useQueryClient();
  const keys = useQuery({ queryKey: ['api-keys'], queryFn: ({ signal }) => call<{ api_keys: APIKey[] | null }>('GET', '/api/v1/api-keys?page_size=100', undefined, signal) });
  const usage = useQuery({ queryKey: ['usage'], queryFn: ({ signal }) => call<{ buckets: UsageBucket[] | null }>('GET', '/api/v1/api-keys/usage?granularity=month', undefined, signal), refetchInterval: 10_000 });
  const [creating, setCreating] = useState(false);
  const [name, setName] = useState('');
  const [made, setMade] = useState<string | null>(null);
  const [saved, setSaved] = useState(false);
  const [revoking, setRevoking] = useState<APIKey | null>(null);
  const [error, setError] = useState<unknown>(null);
  const tokens = (id: string) => (usage.data?.buckets ?? []).filter((b) => b.api_key_id === id).reduce((sum, b) => sum + b.total_tokens, 0);
  const create = async (e: FormEvent) => {
    e.preventDefault();
    setError(null);
    try {
      const answer = await call<{ key: string }>('POST', '/api/v1/api-keys', { name });
      setCreating(false);
      setName('');
      setSaved(false);
      setMade(answer.key);
      await queries.invalidateQueries({ queryKey: ['api-keys'] });
    } catch (e) {
      setError(e);
    }
  };
  const revoke = async () => {
    await call('POST', `/api/v1/api-keys/${revoking!.id}/revoke`);
    await queries.invalidateQueries({ queryKey: ['api-keys'] });
  };
  return (
    <Page title="API keys" actions={<Button onClick={() => { setError(null); setCreating(true); }}>Create Key</Button>}>
      <Failure error={keys.error} />
      {keys.isPending && <Loading />}
      {keys.isSuccess && (keys.data.api_keys ?? []).length === 0 && <Text c="dimmed">No keys yet. A key lets an OpenAI client use your Managed Inference Jobs.</Text>}
      {(keys.data?.api_keys ?? []).length > 0 && (
        <Table.ScrollContainer minWidth={640}>
          <Table>
            <Table.Thead><Table.Tr><Table.Th>Name</Table.Th><Table.Th>Id</Table.Th><Table.Th>Status</Table.Th><Table.Th>Created</Table.Th><Table.Th>Last used</Table.Th><Table.Th>Tokens</Table.Th><Table.Th /></Table.Tr></Table.Thead>
            <Table.Tbody>
              {(keys.data?.api_keys ?? []).map((k) => (
                <Table.Tr key={k.id} data-testid={`key-${k.name}`}>
                  <Table.Td>{k.name}</Table.Td><Table.Td><Code>{k.id}</Code></Table.Td>
                  <Table.Td><Badge variant="light" color={k.status === 'active' ? 'green' : 'gray'}>{k.status}</Badge></Table.Td>
                  <Table.Td>{ago(k.created_at)}</Table.Td><Table.Td>{k.last_used_at ? ago(k.last_used_at) : 'never'}</Table.Td><Table.Td>{tokens(k.id)}</Table.Td>
                  <Table.Td>{k.status === 'active' && <Button size="xs" variant="light" color="red" onClick={() => setRevoking(k)}>Revoke</Button>}</Table.Td>
                </Table.Tr>
              ))}
            </Table.Tbody>
          </Table>
        </Table.ScrollContainer>
      )}
      <Modal opened={creating} onClose={() => setCreating(false)} title="Create Key" closeButtonProps={{ 'aria-label': 'Close' }}>
        <form onSubmit={create}><Stack>
          <TextInput label="Name" required value={name} onChange={(e) => setName(e.currentTarget.value)} data-autofocus />
          <Failure error={error} />
          <Button type="submit">Create</Button>
        </Stack></form>
      </Modal>
      <Modal opened={made !== null} onClose={() => saved && setMade(null)} withCloseButton={saved} closeOnClickOutside={saved} closeOnEscape={saved} title="Save API Key" size="lg">
        <Stack>
          <Text>This is the only time the key is shown.</Text>
          <Code block data-testid="new-key">{made}</Code>
          <CopyButton value={made ?? ''}>{({ copied, copy }) => <Button variant="default" onClick={copy}>{copied ? 'Copied' : 'Copy'}</Button>}</CopyButton>
          <Checkbox label="I have saved the key" checked={saved} onChange={(e) => setSaved(e.currentTarget.checked)} />
          <Button disabled={!saved} onClick={() => setMade(null)}>Done</Button>
        </Stack>
      </Modal>
      <Ask opened={revoking !== null} onClose={() => setRevoking(null)} title={revoking ? `Revoke ${revoking.name}?` : ''} yes="Revoke it for good" no="Keep it" danger onYes={revoke}>
        <Text size="sm">Whoever uses this key is refused from now on. It cannot be taken back; its usage stays readable.</Text>
      </Ask>
    </Page>
  );
}
