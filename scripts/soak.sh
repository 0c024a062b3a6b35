#!/usr/bin/env bash
# Random trouble for the whole platform until DURATION or ROUNDS are over. SEED replays a run.
. "$(dirname "$0")/lib.sh"
export SEED="${SEED:-$RANDOM}" ROUNDS="${ROUNDS:-}" DURATION="${DURATION:-}"
[ -n "$ROUNDS$DURATION" ] || DURATION=1h
export COSMICAC_END_TO_END=1 COSMICAC_BIN="$bin" COSMICAC_UI="$root/build/ui" COSMICAC_SOAK_TRACE="${TRACE:-}"
say "soak with seed $SEED for ${DURATION:-$ROUNDS rounds}"
go test -count=1 -timeout 0 -v -run TestSoakEndToEnd ./services/cosmicac-cli/internal/soak
