// What the form of a new job holds, and what it asks of the API.
type Amount = number | string; // an emptied number field is ''

/** A volume to mount and a port to open, as rows of the form. */
export interface VolumeRow { volume: string | null; readOnly: boolean }
export interface PortRow { port: Amount; protocol: string; name: string }

export const empty = {
  kind: 'gpu_container', name: '', tags: [] as string[], location: null as string | null, gpu: null as string | null, count: 1 as Amount, image: null as string | null,
  disk: 100 as Amount, script: '', model: null as string | null, replicas: 1 as Amount, authorization: true, placement: 'pack', priority: 0 as Amount,
  idleMinutes: '' as Amount, hours: '' as Amount, cost: '' as Amount, volumes: [] as VolumeRow[], ports: [] as PortRow[],
};
export type Form = typeof empty;

/** What is asked of the API. Fields left empty are left out. */
export function requestOf(f: Form): Record<string, unknown> {
  const scaled = (amount: Amount, unit: number) => (amount === '' ? undefined : Math.round(Number(amount) * unit));
  const some = <T,>(rows: T[]) => (rows.length > 0 ? rows : undefined);
  const body: Record<string, unknown> = {
    kind: f.kind, name: f.name, tags: f.tags, location: f.location ?? '', gpu: { model: f.gpu ?? '', count: Number(f.count) },
    placement: f.placement, priority: Number(f.priority) || undefined, max_duration_seconds: scaled(f.hours, 3600), cost_limit_cents: scaled(f.cost, 100),
  };
  if (f.kind === 'gpu_container') {
    Object.assign(body, {
      image: f.image ?? '', disk_gib: Number(f.disk), start_script: f.script || undefined, idle_stop_seconds: scaled(f.idleMinutes, 60),
      volumes: some(f.volumes.map((v) => ({ volume: v.volume ?? '', read_only: v.readOnly }))),
      ports: some(f.ports.map((p) => ({ port: Number(p.port), protocol: p.protocol, name: p.name || undefined }))),
    });
  }
  else Object.assign(body, { model: f.model ?? '', replicas: Number(f.replicas), require_authorization: f.authorization });
  return body;
}
