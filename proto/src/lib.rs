//! The rendezvous protocol: what `proto/podring/podring.proto` generates, and nothing else.
#![allow(missing_docs, reason = "the .proto file documents the generated types")]
#![allow(clippy::all, reason = "generated")]

tonic::include_proto!("podring");
