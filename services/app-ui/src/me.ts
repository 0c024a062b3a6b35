// Who is signed in, what they may do, and whom an actor's id stands for.
import { useQuery } from '@tanstack/react-query';
import { type Me, read, type User } from './api';

export function useMe() {
  const me = useQuery({ ...read<Me>('/me'), staleTime: 60_000 });
  return { user: me.data?.user, projects: me.data?.projects ?? [], may: (right: string) => me.data?.rights.includes(right) ?? false };
}

/** Names an actor: "you", somebody's email where that may be known, a rack, the orchestrator. */
export function useActors(): (actor: string) => string {
  const { user, may } = useMe();
  const users = useQuery({ ...read<{ users: User[] | null }>('/users'), enabled: may('admin'), staleTime: 60_000 });
  return (actor) => {
    if (actor === '') return 'nobody known';
    if (actor === user?.id) return 'you';
    if (actor === 'ork') return 'the orchestrator';
    if (actor.startsWith('u-')) return users.data?.users?.find((u) => u.id === actor)?.email ?? (may('admin') ? actor : 'somebody else');
    return `rack ${actor}`;
  };
}
