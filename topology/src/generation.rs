//! TPU generations: what a slice of each can look like.

use crate::constants::{self, Rates};

/// A TPU generation that libtpu knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Generation {
    /// TPU v2.
    V2,
    /// TPU v3.
    V3,
    /// TPU v4.
    V4,
    /// TPU v5e ("TPU v5 lite").
    V5e,
    /// TPU v5p ("TPU v5").
    V5p,
    /// TPU v6e ("TPU v6 lite", Trillium).
    V6e,
    /// TPU7x (Ironwood).
    Tpu7x,
}

/// When the links of a slice close into rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WrapRule {
    /// An axis wraps if it is as long as the pod's: fixed cables.
    PodAxis(u32),
    /// All axes wrap if all are multiples of a cube's edge: optical switches join whole cubes.
    Cubes(u32),
}

impl Generation {
    /// Every generation, oldest first.
    pub const ALL: [Generation; 7] = [
        Generation::V2,
        Generation::V3,
        Generation::V4,
        Generation::V5e,
        Generation::V5p,
        Generation::V6e,
        Generation::Tpu7x,
    ];

    /// The name in libtpu's topology names.
    pub const fn name(self) -> &'static str {
        match self {
            Generation::V2 => "v2",
            Generation::V3 => "v3",
            Generation::V4 => "v4",
            Generation::V5e => "v5e",
            Generation::V5p => "v5p",
            Generation::V6e => "v6e",
            Generation::Tpu7x => "tpu7x",
        }
    }

    /// Torus dimensions: 2 or 3.
    pub const fn dimensions(self) -> usize {
        match self {
            Generation::V2 | Generation::V3 | Generation::V5e | Generation::V6e => 2,
            Generation::V4 | Generation::V5p | Generation::Tpu7x => 3,
        }
    }

    /// Chips in a full pod.
    pub const fn pod_chips(self) -> u32 {
        match self {
            Generation::V2 | Generation::V5e | Generation::V6e => 256,
            Generation::V3 => 1024,
            Generation::V4 => 4096,
            Generation::V5p => 8960,
            Generation::Tpu7x => 9216,
        }
    }

    /// When its links wrap.
    pub const fn wrap_rule(self) -> WrapRule {
        match self {
            Generation::V2 | Generation::V5e | Generation::V6e => WrapRule::PodAxis(16),
            Generation::V3 => WrapRule::PodAxis(32),
            Generation::V4 | Generation::V5p | Generation::Tpu7x => WrapRule::Cubes(4),
        }
    }

    /// Chips of a host along x, y, z by libtpu's default (before clipping to the slice).
    pub const fn host_bounds(self) -> [u32; 3] {
        [2, 2, 1]
    }

    /// TensorCores on a chip: what accelerator types of v2 to v4 and v5p count.
    pub const fn tensor_cores(self) -> u32 {
        match self {
            Generation::V5e | Generation::V6e => 1,
            _ => 2,
        }
    }

    /// Whether a TensorCore is a device of its own in the default chip configuration.
    pub const fn device_per_core(self) -> bool {
        match self {
            Generation::V2 | Generation::V3 | Generation::V4 | Generation::Tpu7x => true,
            Generation::V5e | Generation::V5p | Generation::V6e => false,
        }
    }

    /// The published numbers of the generation.
    pub const fn rates(self) -> &'static Rates {
        match self {
            Generation::V2 => &constants::V2,
            Generation::V3 => &constants::V3,
            Generation::V4 => &constants::V4,
            Generation::V5e => &constants::V5E,
            Generation::V5p => &constants::V5P,
            Generation::V6e => &constants::V6E,
            Generation::Tpu7x => &constants::TPU7X,
        }
    }

    /// The generation that `text` names, in any of the spellings that libtpu, gcloud and GKE use.
    pub fn from_text(text: &str) -> Option<Generation> {
        let lower = text.trim().to_ascii_lowercase();
        let bare = lower.strip_prefix("tpu-").or_else(|| lower.strip_prefix("tpu ")).unwrap_or(&lower);
        Some(match bare {
            "v2" => Generation::V2,
            "v3" => Generation::V3,
            "v4" | "v4-podslice" => Generation::V4,
            "v5e" | "v5 lite" | "v5litepod" | "v5-lite-podslice" | "v5-lite-device" => Generation::V5e,
            "v5p" | "v5" | "v5p-slice" => Generation::V5p,
            "v6e" | "v6 lite" | "v6e-slice" | "v6e-device" => Generation::V6e,
            "tpu7x" | "7x" => Generation::Tpu7x,
            _ => return None,
        })
    }
}

impl std::fmt::Display for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
