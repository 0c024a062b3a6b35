// The HTTP API of app-node: types, calls and the event stream. It keeps the
// login token in sessionStorage, so that it ends with the browser tab.

export interface GPU { model: string; count: number }
export interface Condition { kind: string; message: string; since?: string | null }
export interface GraphNode { kind: string; name: string; state: string; message: string; since?: string | null; deadline?: string | null }
export interface Port { port: number; protocol?: string; name?: string }
export interface PortAddress extends Port { hosts?: string[] | null; public_port: number }
export interface AttemptNode { node_name: string; gpu_count: number; vmi_name: string; vmi_uid: string; graph?: GraphNode[] | null; ports?: PortAddress[] | null }
export interface Attempt {
  id: string; number: number; state: string; reason: string; message: string; rack_id: string; gone: boolean; abandoned: boolean;
  created_at?: string | null; running_at?: string | null; ended_at?: string | null; claimed_at?: string | null; gone_at?: string | null; nodes?: AttemptNode[] | null;
}
export interface Replica { id: string; index: number; state: string; reason: string; message: string; attempts?: Attempt[] | null }
export interface Job {
  id: string; kind: string; name: string; tags?: string[] | null; location: string; gpu?: GPU | null; cpu_cores_per_gpu: number; memory_gib_per_gpu: number;
  disk_gib: number; image: string; model: string; runtime: string; replicas: number; engine_arguments?: string[] | null; spec_revision: number; require_authorization?: boolean; placement: string; priority: number;
  max_duration_seconds: number; idle_stop_seconds: number; cost_limit_cents: number; price_cents_per_gpu_hour?: number | null; currency: string; cost_cents: number;
  ports?: Port[] | null; volumes?: AttachedVolume[] | null;
  project_id: string; user_id: string; state: string; reason: string; message: string; conditions?: Condition[] | null; endpoint_id?: string; simulated?: boolean;
  created_at: string; updated_at: string; revision: number; replica_list?: Replica[] | null;
}
export interface AttachedVolume { id: string; name: string; read_only: boolean; path: string }
export interface VolumeAttachment { job_id: string; job_name: string; job_state: string; read_only: boolean }
export interface Volume {
  id: string; name: string; project_id: string; rack_id: string; location: string; size_gib: number; storage_class: string; shared: boolean;
  state: string; message: string; attachments?: VolumeAttachment[] | null;
}
export interface JobEvent { sequence: number; time: string; state: string; reason: string; message: string; actor: string; attempt_id: string }
export interface PlanRefusal { rack_id: string; reason: string; message: string }
export interface ReplicaPlan { index: number; rack_id: string; gpu_model: string; nodes: { name: string; gpu_count: number }[]; refusals: PlanRefusal[] }
export interface Plan { fits: boolean; state: string; reason: string; message: string; replicas: ReplicaPlan[] }
export interface NodeGPU { model: string; total: number; healthy: number; held: number; offerable: number; message: string; quarantine: string; holders?: Record<string, number> | null }
export interface RackNode { name: string; schedulable: boolean; message: string; gpus?: NodeGPU[] | null }
export interface Rack {
  id: string; location: string; key?: string; connected: boolean; cordoned: boolean; simulated: boolean; message: string; last_seen_at?: string | null;
  drain_since?: string | null; drain_deadline?: string | null; nodes?: RackNode[] | null;
}
export interface StartFailure { attempt_id: string; job_id: string; time?: string | null; reason: string; message: string; gpu_uuids?: string[] | null }
export interface Quarantine {
  rack_id: string; node_name: string; gpu_model: string; active: boolean; since?: string | null; actor: string; message: string; evidence?: StartFailure[] | null;
}
export interface AbandonedAttempt { attempt_id: string; job_id: string; job_name: string; node_names?: string[] | null; gpu_count: number; present: boolean }
export interface ForgottenRack {
  id: string; location: string; key: string; forgotten_at?: string | null; actor: string; returned: boolean; attempts?: AbandonedAttempt[] | null; disk_job_ids?: string[] | null;
}
export interface AvailableRack { id: string; offerable: number; largest_node_offerable: number; reason: string; message: string }
export interface AvailableGPU {
  model: string; location: string; total: number; held: number; offerable: number; largest_node_offerable: number; racks?: AvailableRack[] | null;
  waiting: number; waiting_gpus: number; longest_wait_seconds: number; price_cents_per_gpu_hour?: number | null; currency: string;
}
export interface Quota {
  project_id: string; maximum_gpus: number | null; held_gpus?: number | null; maximum_volume_gib: number | null; held_volume_gib?: number | null; admitted: boolean;
}
export interface Project { id: string; name: string; members?: string[] | null; quota: Quota }
export interface APIKey { id: string; name: string; status: string; public_id: string; created_at: string; last_used_at?: string | null; expires_at?: string | null }
export interface UsageBucket { start_ms: number; api_key_id: string; requests: number; prompt_tokens: number; completion_tokens: number; total_tokens: number }
export interface Image { name: string; description: string }
export interface Model { id: string; runtime: string; description: string; recommended?: { gpu_model?: string; gpu_count?: number } | null }
export interface Location { code: string; name: string }
export interface Warning { daemon: string; code: string; severity: string; text: string; remedy: string }
export interface MeshNode {
  key: string; name: string; roles?: string[] | null; state: string; reason: string; version: string; ready: boolean; started_at?: string | null; clock_ahead_ms: number;
  peers_known: boolean; agents: number; clients: number; others: number; warnings?: Warning[] | null;
}
export interface MeshLink {
  from: string; to: string; path: string; transport: string; address: string; round_trip_microseconds: number; connected_at?: string | null; suspect: boolean;
}
export interface Mesh { complete: boolean; nodes: MeshNode[]; links: MeshLink[] }
export interface User { id: string; email: string; administrator: boolean }
export interface Me { user: User; projects: { id: string; name: string }[]; rights: string[] }

/** What the server said was wrong, with the field that each rule belongs to. */
export class APIError extends Error {
  constructor(readonly status: number, readonly kind: string, message: string, readonly fields: { field: string; rule: string }[]) {
    super(message);
  }
}

const tokenKey = 'cosmicac.token';
let listeners: (() => void)[] = [];

export const token = {
  get: () => sessionStorage.getItem(tokenKey),
  set: (value: string | null) => {
    if (value === null) sessionStorage.removeItem(tokenKey);
    else sessionStorage.setItem(tokenKey, value);
    for (const l of listeners) l();
  },
  subscribe: (listener: () => void) => {
    listeners.push(listener);
    return () => { listeners = listeners.filter((l) => l !== listener); };
  },
};

async function send(method: string, path: string, body?: unknown, signal?: AbortSignal, extra: Record<string, string> = {}): Promise<Response> {
  const headers: Record<string, string> = { Accept: 'application/json', ...extra };
  const t = token.get();
  if (t) headers['Authorization'] = `Bearer ${t}`;
  if (body !== undefined) headers['Content-Type'] = 'application/json';
  let response: Response;
  try {
    response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
  } catch (e) {
    if (signal?.aborted) throw e;
    throw new APIError(0, 'unreachable', 'the control plane does not answer', []);
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  if (response.status === 401 && t && path !== '/api/v1/login') token.set(null);
  const fields = (problem.errors ?? []).map((x: { location?: string; message?: string }) => ({ field: (x.location ?? '').replace(/^body\./, ''), rule: x.message ?? '' }));
  throw new APIError(response.status, problem.kind ?? '', problem.detail ?? problem.title ?? `the control plane answered ${response.status}`, fields);
}

export async function call<T>(method: string, path: string, body?: unknown, signal?: AbortSignal, headers?: Record<string, string>): Promise<T> {
  const response = await send(method, path, body, signal, headers);
  const text = await response.text();
  return (text ? JSON.parse(text) : undefined) as T;
}

/** A read for useQuery, kept under its path. */
export const read = <T,>(path: string) => ({ queryKey: [path], queryFn: ({ signal }: { signal: AbortSignal }) => call<T>('GET', `/api/v1${path}`, undefined, signal) });

/** Splits a text/event-stream into events; feed it chunks as they come. */
export function eventParser(each: (name: string, data: string) => void): (chunk: string) => void {
  let rest = '';
  let name = '';
  let data: string[] = [];
  return (chunk) => {
    rest += chunk;
    let end: number;
    while ((end = rest.search(/\r\n|\n|\r(?!$)/)) >= 0) {
      const line = rest.slice(0, end);
      rest = rest.slice(end + (rest.startsWith('\r\n', end) ? 2 : 1));
      if (line === '') {
        if (data.length > 0 || name !== '') each(name || 'message', data.join('\n'));
        name = '';
        data = [];
      } else if (line.startsWith('event:')) name = line.slice(6).trim();
      else if (line.startsWith('data:')) data.push(line.slice(5).replace(/^ /, ''));
    }
  };
}

/**
 * Follows a job until aborted; reconnects after a break, waiting a little longer each time. onBroken hears why there is
 * no stream, and null once there is one again.
 */
export async function followJob(id: string, signal: AbortSignal, onJob: (job: Job) => void, onDeleted: () => void, onBroken: (error: unknown) => void): Promise<void> {
  for (let wait = 500; !signal.aborted; wait = Math.min(wait * 2, 10_000)) {
    let deleted = false;
    try {
      const response = await send('GET', `/api/v1/jobs/${encodeURIComponent(id)}/events`, undefined, signal, { Accept: 'text/event-stream' });
      const parse = eventParser((name, data) => {
        wait = 500;
        onBroken(null);
        if (name === 'job') onJob(JSON.parse(data) as Job);
        if (name === 'deleted') deleted = true;
      });
      const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        parse(value);
      }
    } catch (e) {
      if (e instanceof APIError && e.status === 404) deleted = true;
      else if (!signal.aborted) onBroken(e);
    }
    if (deleted) return onDeleted();
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

export const ended = (state: string) => ['stopped', 'succeeded', 'failed', 'cancelled'].includes(state);
