# The commands of this repository. Each works from a bare clone and needs only Rust, Python ≥ 3.11 and a C++ compiler;
# packages come pinned from PyPI and crates.io. BACKEND=gloo runs the Python side on torch's own backend instead.
SHELL := bash
BACKEND ?= tpu
export BACKEND
PY := .venv/bin/python

.PHONY: help venv build check test demo conformance titan vchip clean
help:
	@sed -n 's/^## //p' Makefile

## make venv         .venv with the pinned packages (torch and all)
venv:
	@scripts/venv

## make build        the core and the face, installed into .venv
build: venv
	@scripts/build

## make check        format, lints, quick Rust tests: under a minute, no torch needed
check: venv
	@scripts/check

## make test         everything: set-up, check, mypy, torch's own suite, ours
test:
	@scripts/warm
	@scripts/build
	@scripts/venv vchip
	@scripts/test

## make demo         4 ranks train a transformer, FSDP2 × TP; out/demo/loss.png; times beside gloo's
demo: build
	@scripts/demo

## make conformance  torch's shipped distributed suite, whole, 2, 3 and 4 ranks, against gloo's pass list
conformance: build
	@$(PY) -m tests.conformance --backend $(BACKEND)

## make titan        TorchTitan's debug model, 2 ranks FSDP2, 5 steps
titan: build
	@scripts/venv titan
	@$(PY) -m tests.titan --backend $(BACKEND)

## make vchip        torch_tpu on virtual chips: every scenario, 2 and 4 ranks; make test runs some
vchip: build
	@scripts/venv vchip
	@PODRING_REQUIRE_VCHIP=1 PODRING_VCHIP_ALL=1 $(PY) -m pytest -q tests/vchip

## make clean        removes what was built, .venv apart
clean:
	rm -rf target out .venv/.podring-*
