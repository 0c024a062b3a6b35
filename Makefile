# Thin: every target calls a script or one command. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

.PHONY: help setup build ui demo test test-go test-cluster test-ui test-end-to-end soak bench-mesh bench-placement bench-scale images test-vm test-install lint generate install clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 20

setup: ## Install what a fresh Debian machine lacks (apt, npm), with progress
	@scripts/setup.sh

build: setup ## Build every binary into build/bin and the web interface into build/ui
	@scripts/build.sh

demo: build ## Start everything on loopback, run the main job, stay up until Ctrl-C (ONCE=1: exit after it)
	@build/bin/cosmicac demo --bin build/bin --ui build/ui $(if $(ONCE),--once) $(if $(DIR),--dir $(DIR)) $(if $(PORT),--port $(PORT))

test: ## Run every test: lint, unit, cluster, browser, end to end
	@scripts/test.sh

test-go: ## Unit and in-process tests of proto, pkg and services, with the race detector
	@scripts/test.sh go

test-cluster: build ## Tests of the embedded cluster
	@scripts/test.sh cluster

test-ui: build ## Tests of the web interface in Chromium
	@scripts/test.sh ui

test-end-to-end: build ## The whole platform: main job, killed daemons, strangers, bad input
	@scripts/test.sh end-to-end

soak: build ## Random trouble for the whole platform, an hour (SEED=N replays; ROUNDS=N or DURATION=8h; TRACE=1)
	@SEED=$(SEED) ROUNDS=$(ROUNDS) DURATION=$(DURATION) TRACE=$(TRACE) scripts/soak.sh

bench-mesh: ## Measure the mesh beside gRPC, NATS and Holepunch, 20 minutes (SHORT=1: 3; FIGURES=unary,bulk; JSON=FILE)
	@scripts/bench.sh mesh

bench-placement: ## Measure placement on 10,000 nodes beside first fit, best fit and kube-scheduler (SEED=n; JSON=FILE)
	@scripts/bench.sh placement

bench-scale: build ## 200 nodes x 8 GPUs, 500 jobs at once, beside bare client-go, 5 minutes (SHORT=1: 20 nodes, 50 jobs; JSON=FILE)
	@scripts/bench.sh scale

test-crowd: ## 200 nodes in one DHT, 10,000 connections: by hand, not part of `make test`
	@scripts/test.sh crowd

images: build ## Build the agent disk's container image into build/images (REGISTRY=host/path pushes it)
	@scripts/images.sh

test-vm: images ## The agent in a real virtual machine under qemu: by hand, as root, not part of `make test`
	@scripts/test-vm.sh

test-install: build ## `make install` and `cosmicac bootstrap` on a real systemd in a container: by hand, as root
	@scripts/test-install.sh

lint: ## gofmt, vet, staticcheck, buf lint, stale and breaking wire code
	@scripts/lint.sh

generate: ## Make proto/gen anew from proto/
	@scripts/generate.sh

install: build ## Install binaries, units and the web interface on this host (DESTDIR honoured)
	@scripts/install.sh

clean: ## Remove build/
	@rm -rf build
