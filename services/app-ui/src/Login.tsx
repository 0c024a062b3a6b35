import { Button, Center, Paper, PasswordInput, Stack, TextInput, Title } from '@mantine/core';
import { type FormEvent, useState } from 'react';
import { call, token } from './api';
import { Failure } from './parts';

export function Login() {
  const [email, setEmail] = useState('');
  const [password, setPassword] = useState('');
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const submit = async (e: FormEvent) => {
    e.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const answer = await call<{ token: string }>('POST', '/api/v1/login', { email, password });
      token.set(answer.token);
    } catch (e) {
      setError(e);
      setBusy(false);
    }
  };
  return (
    <Center mih="100vh" p="md">
      <Paper withBorder shadow="sm" p="xl" w={380}>
        <form onSubmit={submit}>
          <Stack>
            <Title order={2}>CosmicAC</Title>
            <TextInput label="Email" type="email" required autoComplete="username" value={email} onChange={(e) => setEmail(e.currentTarget.value)} />
            <PasswordInput label="Password" required autoComplete="current-password" value={password} onChange={(e) => setPassword(e.currentTarget.value)} />
            <Failure error={error} />
            <Button type="submit" loading={busy}>Log in</Button>
          </Stack>
        </form>
      </Paper>
    </Center>
  );
}
