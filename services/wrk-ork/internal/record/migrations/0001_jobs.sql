-- Racks: the operator's entries. What workers report is not stored.
CREATE TABLE racks (
  id             TEXT PRIMARY KEY,
  location       TEXT NOT NULL,
  key            TEXT NOT NULL UNIQUE,
  allowed_models TEXT NOT NULL,
  maximum_gpus   INTEGER NOT NULL,
  cordoned       INTEGER NOT NULL,
  created_at     INTEGER NOT NULL
) STRICT;

-- Jobs. `spec` is protobuf and never changes; `doc` is JSON of what the
-- columns do not say. Times are microseconds since 1970 UTC.
CREATE TABLE jobs (
  id         TEXT PRIMARY KEY,
  project_id TEXT NOT NULL,
  user_id    TEXT NOT NULL,
  kind       INTEGER NOT NULL,
  name       TEXT NOT NULL,
  state      INTEGER NOT NULL,
  settled    INTEGER NOT NULL,
  revision   INTEGER NOT NULL,
  spec       BLOB NOT NULL,
  doc        TEXT NOT NULL
) STRICT;
CREATE INDEX jobs_by_project ON jobs (project_id, id);
CREATE INDEX jobs_live ON jobs (id) WHERE settled = 0;

CREATE TABLE replicas (
  id       TEXT PRIMARY KEY,
  job_id   TEXT NOT NULL,
  idx      INTEGER NOT NULL,
  failures INTEGER NOT NULL
) STRICT;
CREATE INDEX replicas_by_job ON replicas (job_id, idx);

-- `outcome` is the ended state, null while there is none.
CREATE TABLE attempts (
  id         TEXT PRIMARY KEY,
  job_id     TEXT NOT NULL,
  replica_id TEXT NOT NULL,
  number     INTEGER NOT NULL,
  state      INTEGER NOT NULL,
  outcome    INTEGER,
  rack_id    TEXT NOT NULL,
  gone       INTEGER NOT NULL,
  doc        TEXT NOT NULL
) STRICT;
CREATE INDEX attempts_by_job ON attempts (job_id, number);
CREATE INDEX attempts_held ON attempts (rack_id) WHERE gone = 0;

-- An attempt's outcome is written once, whatever the code above does.
CREATE TRIGGER attempts_outcome_once BEFORE UPDATE ON attempts
WHEN OLD.outcome IS NOT NULL AND NEW.outcome IS NOT OLD.outcome
BEGIN
  SELECT RAISE(ABORT, 'the outcome of an attempt is written once');
END;

CREATE TABLE events (
  sequence   INTEGER PRIMARY KEY AUTOINCREMENT,
  job_id     TEXT NOT NULL,
  replica_id TEXT NOT NULL,
  attempt_id TEXT NOT NULL,
  time       INTEGER NOT NULL,
  state      INTEGER NOT NULL,
  reason     INTEGER NOT NULL,
  message    TEXT NOT NULL,
  actor      TEXT NOT NULL
) STRICT;
CREATE INDEX events_by_job ON events (job_id, sequence);

CREATE TABLE idempotency (
  project_id TEXT NOT NULL,
  key        TEXT NOT NULL,
  job_id     TEXT NOT NULL,
  spec_hash  BLOB NOT NULL,
  created_at INTEGER NOT NULL,
  PRIMARY KEY (project_id, key)
) STRICT;

-- One-time join tokens, by the SHA-256 of the token.
CREATE TABLE join_tokens (
  hash        BLOB PRIMARY KEY,
  job_id      TEXT NOT NULL,
  attempt_id  TEXT NOT NULL,
  plan        INTEGER NOT NULL,
  node_index  INTEGER NOT NULL,
  redeemed_by TEXT NOT NULL,
  redeemed_at INTEGER NOT NULL
) STRICT;
CREATE INDEX join_tokens_by_attempt ON join_tokens (attempt_id);

CREATE TABLE tombstones (
  job_id     TEXT PRIMARY KEY,
  project_id TEXT NOT NULL,
  name       TEXT NOT NULL,
  deleted_at INTEGER NOT NULL
) STRICT;
