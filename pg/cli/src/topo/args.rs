//! Values of `podring topo`'s options.

use podring_topology::{
    Slice, TopologyError,
    cost::Collective,
    mesh::{Axis, MeshRequest},
};

use super::TopoError;

/// Three numbers, one per axis.
#[derive(Debug, Clone, Copy)]
pub(super) struct Triple(pub [u32; 3]);

/// Parses `2,2,1` or `2x2x1`.
pub(super) fn triple(text: &str) -> Result<Triple, String> {
    let numbers: Result<Vec<u32>, _> = text.split([',', 'x']).map(|part| part.trim().parse()).collect();
    numbers
        .ok()
        .and_then(|numbers| <[u32; 3]>::try_from(numbers).ok())
        .map(Triple)
        .ok_or_else(|| "expected three numbers, as in 2,2,1".to_owned())
}

/// Parses `4096`, `64MiB`, `1GB`.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err("expected a number of bytes, as in 4096, 64MiB or 1GB".to_owned()),
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(scale))
        .ok_or_else(|| "expected a number of bytes, as in 4096, 64MiB or 1GB".to_owned())
}

/// Splits `a=1,b=2`.
fn pairs<'a>(
    option: &'static str,
    text: &'a str,
    expected: &'static str,
) -> Result<Vec<(&'a str, &'a str)>, TopoError> {
    text.split(',')
        .map(|part| match part.split_once('=') {
            Some((name, value)) if !name.trim().is_empty() => Ok((name.trim(), value.trim())),
            _ => Err(TopoError::Argument { option, value: text.to_owned(), expected }),
        })
        .collect()
}

/// A mesh as asked for on the command line.
pub(super) fn request(
    mesh: &str,
    traffic: Option<&str>,
    talk: Option<&str>,
    dcn: Option<&str>,
    bytes: u64,
) -> Result<MeshRequest, TopoError> {
    let wrong = |option, value: &str, expected| TopoError::Argument { option, value: value.to_owned(), expected };
    let sizes = "axes with sizes, as in dp=8,tp=16";
    let mut axes = Vec::new();
    for (name, size) in pairs("--mesh", mesh, sizes)? {
        axes.push(Axis::new(name, size.parse().map_err(|_| wrong("--mesh", mesh, sizes))?));
    }
    let position = |axes: &[Axis], name: &str| {
        axes.iter().position(|axis| axis.name == name).ok_or_else(|| TopologyError::UnknownAxis {
            name: name.to_owned(),
            axes: axes.iter().map(|axis| axis.name.clone()).collect(),
        })
    };
    if let Some(text) = traffic {
        let expected = "axes with weights, as in dp=1,tp=10";
        for (name, weight) in pairs("--traffic", text, expected)? {
            let at = position(&axes, name)?;
            axes[at].traffic = Some(weight.parse().map_err(|_| wrong("--traffic", text, expected))?);
        }
    }
    if let Some(text) = talk {
        let expected = "axes with collectives, as in ep=all-to-all; collectives: allgather, reduce-scatter, allreduce, \
                        all-to-all, broadcast, reduce, gather, scatter, permute";
        for (name, collective) in pairs("--talk", text, expected)? {
            let at = position(&axes, name)?;
            let known = Collective::ALL.into_iter().find(|known| known.name() == collective);
            axes[at].talk = known.ok_or_else(|| wrong("--talk", text, expected))?;
        }
    }
    let mut across = None;
    if let Some(text) = dcn {
        let expected = "axes with slices, as in dp=2";
        let mut factors = Vec::new();
        for (name, slices) in pairs("--dcn", text, expected)? {
            factors.push((name.to_owned(), slices.parse().map_err(|_| wrong("--dcn", text, expected))?));
        }
        across = Some(factors);
    }
    Ok(MeshRequest { axes, bytes, dcn: across })
}

/// Ranks of a JSON list of device ids, nested or flat.
pub(super) fn ranks(slice: &Slice, text: &str) -> Result<Vec<u32>, TopoError> {
    fn flatten(value: &serde_json::Value, into: &mut Vec<u64>) -> Option<()> {
        match value {
            serde_json::Value::Array(items) => items.iter().try_for_each(|item| flatten(item, into)),
            _ => {
                into.push(value.as_u64()?);
                Some(())
            }
        }
    }
    let mut ids = Vec::new();
    let parsed: Option<serde_json::Value> = serde_json::from_str(text).ok();
    parsed.and_then(|value| flatten(&value, &mut ids)).ok_or_else(|| TopoError::Argument {
        option: "--mesh-ids",
        value: text.chars().take(60).collect(),
        expected: "a JSON list of device ids in mesh shape",
    })?;
    ids.into_iter()
        .map(|id| {
            let rank = u32::try_from(id).ok().and_then(|id| slice.rank_of_id(id));
            rank.ok_or(TopologyError::UnknownDevice { id }.into())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts() {
        for (text, value) in [("0", 0), ("4096", 4096), ("64MiB", 64 << 20), ("1 GB", 1_000_000_000), ("2k", 2048)] {
            assert_eq!(bytes(text), Ok(value), "{text}");
        }
        for text in ["", "MiB", "-1", "1.5GB", "4 parsecs", "99999999999TiB"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn triples() {
        assert_eq!(triple("2,2,1").map(|t| t.0), Ok([2, 2, 1]));
        assert_eq!(triple("4x2x1").map(|t| t.0), Ok([4, 2, 1]));
        assert!(triple("2,2").is_err());
    }
}
