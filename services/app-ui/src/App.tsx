import { AppShell, Badge, Burger, Button, Group, NavLink, Text, Title } from '@mantine/core';
import { useDisclosure } from '@mantine/hooks';
import { IconCpu, IconDatabase, IconFolders, IconKey, IconLayoutList, IconStethoscope, IconTopologyStar3 } from '@tabler/icons-react';
import { useQueryClient } from '@tanstack/react-query';
import { useSyncExternalStore } from 'react';
import { Link, Redirect, Route, Switch, useLocation } from 'wouter';
import { call, token } from './api';
import { CreateJob } from './CreateJob';
import { Health } from './Health';
import { JobPage } from './JobPage';
import { Jobs } from './Jobs';
import { Keys } from './Keys';
import { Login } from './Login';
import { useMe } from './me';
import { Network } from './Network';
import { Projects } from './Projects';
import { Racks } from './Racks';
import { Volumes } from './Volumes';

export function App() {
  const loggedIn = useSyncExternalStore(token.subscribe, () => token.get() !== null);
  return loggedIn ? <Shell /> : <Login />;
}

const pages = [
  { path: '/jobs', label: 'Jobs', icon: IconLayoutList },
  { path: '/volumes', label: 'Volumes', icon: IconDatabase, right: 'volumes:read' },
  { path: '/racks', label: 'Racks', icon: IconCpu },
  { path: '/projects', label: 'Projects', icon: IconFolders },
  { path: '/health', label: 'Health', icon: IconStethoscope },
  { path: '/network', label: 'Network', icon: IconTopologyStar3, right: 'admin' },
];

function Shell() {
  const [opened, { toggle, close }] = useDisclosure();
  const [location] = useLocation();
  const queries = useQueryClient();
  const { user, may } = useMe();
  const logout = async () => {
    await call('POST', '/api/v1/logout').catch(() => undefined);
    token.set(null);
    queries.clear();
  };
  return (
    <AppShell header={{ height: 56 }} navbar={{ width: 220, breakpoint: 'sm', collapsed: { mobile: !opened } }} padding="md">
      <AppShell.Header>
        <Group h="100%" px="md" justify="space-between" wrap="nowrap">
          <Group wrap="nowrap">
            <Burger opened={opened} onClick={toggle} hiddenFrom="sm" size="sm" aria-label="Menu" aria-expanded={opened} />
            <Title order={3}>CosmicAC</Title>
          </Group>
          <Group gap="sm" wrap="nowrap">
            <Text size="sm" c="dimmed" visibleFrom="sm">{user?.email}</Text>
            {user?.administrator && <Badge variant="light" visibleFrom="sm">administrator</Badge>}
            <Button variant="default" size="xs" onClick={logout}>Log out</Button>
          </Group>
        </Group>
      </AppShell.Header>
      <AppShell.Navbar p="sm" aria-label="Main">
        {pages.filter((p) => !p.right || may(p.right)).map((p) => (
          <NavLink key={p.path} component={Link} href={p.path} label={p.label} leftSection={<p.icon size={18} aria-hidden />} active={location.startsWith(p.path)} onClick={close} />
        ))}
        <NavLink label="Settings" defaultOpened>
          <NavLink label="Developer" defaultOpened>
            <NavLink component={Link} href="/settings/api-keys" label="API keys" leftSection={<IconKey size={18} aria-hidden />} active={location === '/settings/api-keys'} onClick={close} />
          </NavLink>
        </NavLink>
      </AppShell.Navbar>
      <AppShell.Main>
        <Switch>
          <Route path="/jobs/new" component={CreateJob} />
          <Route path="/jobs/:id">{(p) => <JobPage id={p.id} />}</Route>
          <Route path="/jobs" component={Jobs} />
          <Route path="/volumes" component={Volumes} />
          <Route path="/racks" component={Racks} />
          <Route path="/projects" component={Projects} />
          <Route path="/health" component={Health} />
          <Route path="/network" component={Network} />
          <Route path="/settings/api-keys" component={Keys} />
          <Route path="/"><Redirect to="/jobs" /></Route>
          <Route><Text>There is no such page.</Text></Route>
        </Switch>
      </AppShell.Main>
    </AppShell>
  );
}
