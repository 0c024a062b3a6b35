-- Times are milliseconds since 1970 UTC. Ids are typed (u-, p-, k-) and never used again.

CREATE TABLE users (
  id            TEXT PRIMARY KEY,
  email         TEXT NOT NULL,             -- as typed, trimmed
  email_key     TEXT NOT NULL,             -- lower case, for look-ups
  password_hash TEXT NOT NULL,             -- PHC string, argon2id
  administrator INTEGER NOT NULL DEFAULT 0,
  disabled      INTEGER NOT NULL DEFAULT 0,
  created_at    INTEGER NOT NULL,
  updated_at    INTEGER NOT NULL,
  deleted_at    INTEGER                    -- kept for audit and usage; the email is free again
) STRICT;
CREATE UNIQUE INDEX users_email ON users (email_key) WHERE deleted_at IS NULL;

CREATE TABLE projects (
  id         TEXT PRIMARY KEY,
  name       TEXT NOT NULL,
  created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE memberships (
  project_id TEXT NOT NULL REFERENCES projects (id),
  user_id    TEXT NOT NULL REFERENCES users (id),
  personal   INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (project_id, user_id)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX memberships_personal ON memberships (user_id) WHERE personal = 1;
CREATE INDEX memberships_user ON memberships (user_id);

-- The token itself is never stored, only its SHA-256.
CREATE TABLE tokens (
  hash       BLOB PRIMARY KEY,
  user_id    TEXT NOT NULL REFERENCES users (id),
  created_at INTEGER NOT NULL,
  expires_at INTEGER NOT NULL,
  last_limit INTEGER NOT NULL              -- expires_at never moves beyond this
) STRICT, WITHOUT ROWID;
CREATE INDEX tokens_user ON tokens (user_id);
CREATE INDEX tokens_expiry ON tokens (expires_at);

-- The key itself is never stored, only its HMAC-SHA256.
CREATE TABLE api_keys (
  id           TEXT PRIMARY KEY,
  public_id    TEXT NOT NULL UNIQUE,
  hmac         BLOB NOT NULL,
  name         TEXT NOT NULL,
  user_id      TEXT NOT NULL REFERENCES users (id),
  project_id   TEXT NOT NULL REFERENCES projects (id),
  created_at   INTEGER NOT NULL,
  updated_at   INTEGER NOT NULL,
  expires_at   INTEGER,
  revoked_at   INTEGER,
  last_used_at INTEGER
) STRICT;
CREATE INDEX api_keys_user ON api_keys (user_id);

CREATE TABLE images (
  name         TEXT PRIMARY KEY,
  position     INTEGER NOT NULL,
  reference    TEXT NOT NULL,
  default_user TEXT NOT NULL,
  description  TEXT NOT NULL
) STRICT;

CREATE TABLE models (
  id          TEXT PRIMARY KEY,
  position    INTEGER NOT NULL,
  name        TEXT NOT NULL,
  runtime     TEXT NOT NULL,
  description TEXT NOT NULL,
  image       TEXT NOT NULL,
  arguments   TEXT NOT NULL,               -- JSON array
  gpu_model   TEXT NOT NULL,
  gpu_count   INTEGER NOT NULL
) STRICT;

CREATE TABLE locations (
  code TEXT PRIMARY KEY,
  name TEXT NOT NULL
) STRICT;

CREATE TABLE audit (
  sequence INTEGER PRIMARY KEY AUTOINCREMENT,
  time     INTEGER NOT NULL,
  actor    TEXT NOT NULL,                  -- user id, "bootstrap" or ""
  action   TEXT NOT NULL,
  target   TEXT NOT NULL,
  outcome  TEXT NOT NULL,                  -- "ok" or a kind of pkg/fault
  address  TEXT NOT NULL
) STRICT;
CREATE INDEX audit_time ON audit (time);

-- Records are kept for a while so that one sent twice is counted once.
CREATE TABLE usage_records (
  id                       TEXT PRIMARY KEY,
  received_at              INTEGER NOT NULL,
  time                     INTEGER NOT NULL,
  api_key_id               TEXT NOT NULL,
  project_id               TEXT NOT NULL,
  endpoint_id              TEXT NOT NULL,
  model                    TEXT NOT NULL,
  prompt_tokens            INTEGER NOT NULL,
  completion_tokens        INTEGER NOT NULL,
  http_status              INTEGER NOT NULL,
  duration_milliseconds    INTEGER NOT NULL,
  first_token_milliseconds INTEGER NOT NULL,
  incomplete               INTEGER NOT NULL
) STRICT;
CREATE INDEX usage_records_received ON usage_records (received_at);

-- Hours are kept for good.
CREATE TABLE usage_hours (
  api_key_id        TEXT NOT NULL,
  hour              INTEGER NOT NULL,      -- start, in seconds since 1970 UTC
  endpoint_id       TEXT NOT NULL,
  project_id        TEXT NOT NULL,
  requests          INTEGER NOT NULL,
  prompt_tokens     INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  PRIMARY KEY (api_key_id, hour, endpoint_id, project_id)
) STRICT, WITHOUT ROWID;
