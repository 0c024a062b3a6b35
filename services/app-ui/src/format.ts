// Times, spans and money as people read them.

/** A span of seconds in its two largest units: "45 s", "12 min", "3 h 20 min", "2 d 4 h". */
export function span(seconds: number): string {
  const s = Math.max(0, Math.round(seconds));
  if (s < 120) return `${s} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${hours / 24} d`;
}

/** Seconds from a time until now, by this computer's clock; 0 for what lies ahead. */
export const since = (time: string, now = Date.now()) => Math.max(0, (now - new Date(time).getTime()) / 1000);

export const ago = (time?: string | null) => (time ? `${span(since(time))} ago` : '–');

export const when = (time: string | number) => new Date(time).toLocaleString();

export const money = (cents: number, currency: string) => `${(cents / 100).toFixed(2)} ${currency}`.trim();

export const plural = (n: number, one: string, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
