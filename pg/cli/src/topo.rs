//! `podring topo`: a slice, its devices, meshes over it and what collectives take there.

pub(crate) mod args;
mod json;
mod png;
mod text;

use std::{
    io::{IsTerminal, Read, Write},
    path::PathBuf,
};

use clap::{Args, ValueEnum};
use podring_topology::{
    Slice, TopologyError,
    cost::Collective,
    mesh::{self, AxisReport, Mesh, MeshRequest},
};

/// A slice, its devices, a mesh over it and what collectives take there; no TPU is needed.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  podring topo v5p:4x4x8 --mesh dp=8,tp=16
  podring topo v5e:4x4*2 --mesh dp=2,fsdp=4,tp=4 --dcn dp=2 --json
  podring topo v4-32 --devices
  podring topo --accelerator-type v5litepod-16 --topology 4x4")]
pub struct Topo {
    /// Slice: "v5p:4x4x8", "v5p:4x4x8_twisted", "v4-32", "v5litepod-16", "v5e:4x4*2" (two slices)
    ///
    /// Default: --accelerator-type and --topology, else TPU_ACCELERATOR_TYPE and TPU_TOPOLOGY.
    slice: Option<String>,
    /// Accelerator type, checked against the topology if both are given
    #[arg(long, value_name = "TYPE", conflicts_with = "slice")]
    accelerator_type: Option<String>,
    /// Topology, as in TPU_TOPOLOGY
    #[arg(long, value_name = "SHAPE", conflicts_with = "slice")]
    topology: Option<String>,
    /// Mesh axes, outermost first: dp=8,tp=16
    #[arg(long, value_name = "AXES")]
    mesh: Option<String>,
    /// How much axes talk, relative to each other: dp=1,tp=10 [default: each axis 4 times the one before it]
    #[arg(long, value_name = "WEIGHTS", requires = "mesh")]
    traffic: Option<String>,
    /// What axes mostly run: ep=all-to-all [default: allreduce]
    #[arg(long, value_name = "COLLECTIVES", requires = "mesh")]
    talk: Option<String>,
    /// Along which axes several slices lie: dp=2 [default: as far out as they fit]
    #[arg(long, value_name = "AXES", requires = "mesh")]
    dcn: Option<String>,
    /// Judge this mesh instead of choosing one: a JSON list of device ids in mesh shape; "-" reads standard input
    #[arg(long, value_name = "FILE", requires = "mesh")]
    mesh_ids: Option<PathBuf>,
    /// Bytes of a collective: 4096, 64MiB, 1GB
    #[arg(long, value_name = "BYTES", default_value = "64MiB", value_parser = args::bytes)]
    bytes: u64,
    /// Number of slices; overrides "*N" in the name
    #[arg(long, value_name = "N")]
    num_slices: Option<u32>,
    /// Chips of a host along x, y, z: 2,2,1
    #[arg(long, value_name = "X,Y,Z", value_parser = args::triple)]
    chips_per_host_bounds: Option<args::Triple>,
    /// Chip configuration: default, or megacore (v4 and v5p)
    #[arg(long, value_name = "NAME")]
    chip_config: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write a picture to this file
    #[arg(long, value_name = "FILE")]
    png: Option<PathBuf>,
    /// Print the table of devices however long it is
    #[arg(long)]
    devices: bool,
    /// Layers (z) to draw of each slice
    #[arg(long, value_name = "N", default_value_t = 2)]
    layers: u32,
    /// Colour mesh axes
    #[arg(long, value_enum, default_value_t = Colour::Auto)]
    color: Colour,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Colour {
    Auto,
    Always,
    Never,
}

/// Why `podring topo` failed.
#[derive(Debug, thiserror::Error)]
pub enum TopoError {
    /// The slice, the mesh or the group can't be.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// An option's value doesn't parse.
    #[error("{option} \"{value}\": expected {expected}")]
    Argument {
        /// The option.
        option: &'static str,
        /// What came.
        value: String,
        /// What should have come.
        expected: &'static str,
    },
    /// A file can't be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The picture can't be encoded.
    #[error("cannot encode the picture: {0}")]
    Picture(#[from] ::png::EncodingError),
    /// Standard output is gone.
    #[error("cannot write: {0}")]
    Output(#[from] std::io::Error),
}

/// Everything that is shown, in any form.
struct View<'a> {
    slice: &'a Slice,
    bytes: u64,
    mesh: Option<MeshView>,
}

struct MeshView {
    request: MeshRequest,
    mesh: Mesh,
    reports: Vec<AxisReport>,
}

/// Collectives that are predicted for each axis.
const SHOWN: [Collective; 4] =
    [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce, Collective::AllToAll];

impl Topo {
    /// Runs the command; returns the exit code.
    pub fn run(&self) -> i32 {
        match self.execute() {
            Ok(()) => 0,
            // A reader that has seen enough (`| head`) is no error.
            Err(TopoError::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => 0,
            Err(error) => {
                crate::terminal::err(&format!("podring topo: {error}"));
                1
            }
        }
    }

    fn execute(&self) -> Result<(), TopoError> {
        let slice = self.slice()?;
        let mesh = self.mesh_view(&slice)?;
        let view = View { slice: &slice, bytes: self.bytes, mesh };
        // First, so that a failure leaves standard output empty.
        if let Some(path) = &self.png {
            let picture = png::picture(&view)?;
            std::fs::write(path, picture).map_err(|error| TopoError::File { path: path.clone(), error })?;
        }
        let mut out = std::io::stdout().lock();
        if self.json {
            serde_json::to_writer(&mut out, &json::document(&view)).map_err(std::io::Error::from)?;
            writeln!(out)?;
        } else {
            let colour = match self.color {
                Colour::Always => true,
                Colour::Never => false,
                Colour::Auto => std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none(),
            };
            out.write_all(text::page(&view, self.layers, colour, self.devices).as_bytes())?;
        }
        out.flush()?;
        Ok(())
    }

    fn slice(&self) -> Result<Slice, TopoError> {
        let options = podring_topology::SliceOptions {
            num_slices: self.num_slices,
            chips_per_host_bounds: self.chips_per_host_bounds.map(|triple| triple.0),
            wrap: None,
            chip_config_name: self.chip_config.clone(),
        };
        if let Some(name) = &self.slice {
            return Ok(podring_topology::parse_with(name, &options)?);
        }
        let (mut accelerator, mut topology) = (self.accelerator_type.clone(), self.topology.clone());
        if accelerator.is_none() && topology.is_none() {
            accelerator = std::env::var("TPU_ACCELERATOR_TYPE").ok();
            topology = std::env::var("TPU_TOPOLOGY").ok();
        }
        Ok(podring_topology::from_accelerator(accelerator.as_deref(), topology.as_deref(), &options)?)
    }

    fn mesh_view(&self, slice: &Slice) -> Result<Option<MeshView>, TopoError> {
        let Some(axes) = &self.mesh else { return Ok(None) };
        let request =
            args::request(axes, self.traffic.as_deref(), self.talk.as_deref(), self.dcn.as_deref(), self.bytes)?;
        let mesh = match &self.mesh_ids {
            None => mesh::assign(slice, &request)?,
            Some(path) => {
                let mut text = String::new();
                let read = if path.as_os_str() == "-" {
                    std::io::stdin().read_to_string(&mut text).map(drop)
                } else {
                    std::fs::read_to_string(path).map(|content| text = content)
                };
                read.map_err(|error| TopoError::File { path: path.clone(), error })?;
                Mesh::from_ranks(slice, &request.axes, args::ranks(slice, &text)?)?
            }
        };
        let reports = (0..request.axes.len()).map(|axis| mesh.report(slice, axis)).collect::<Result<_, _>>()?;
        Ok(Some(MeshView { request, mesh, reports }))
    }
}
