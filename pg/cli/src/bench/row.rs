//! One measured line: as JSON, and in the table.

use serde::Serialize;

use super::op::Op;

/// What `--json` lists. `bytes` is nccl-tests' size: the whole buffer per rank; bandwidths are in 1e9 bytes a second.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    pub(super) backend: &'static str,
    pub(super) op: &'static str,
    pub(super) dtype: &'static str,
    pub(super) bytes: u64,
    pub(super) ranks: u32,
    pub(super) hosts: u32,
    pub(super) p50_us: f64,
    pub(super) algbw_gbps: f64,
    pub(super) busbw_gbps: f64,
    pub(super) wrong: u64,
}

/// Algorithm and bus bandwidth in GB/s. No time measured (below the clock's step) gives 0, which JSON can carry.
pub(super) fn bandwidth(op: Op, bytes: u64, ranks: u32, p50_us: f64) -> (f64, f64) {
    let algbw = if p50_us > 0.0 { bytes as f64 / (p50_us * 1e3) } else { 0.0 };
    (algbw, algbw * op.bus_factor(ranks))
}

/// The column heads; `vs` adds the ratio's.
pub(super) fn header(vs: bool) -> String {
    let ratio = if vs { "   ratio" } else { "" };
    format!(
        "{:>11} {:>11} {:>13} {:>10} {:>8} {:>10} {:>10} {:>10} {:>6}{ratio}",
        "bytes", "count", "dtype", "redop", "backend", "time us", "algbw GB/s", "busbw GB/s", "#wrong"
    )
}

impl Row {
    /// The row in the table. `ratio` is the other backend's time over this one's.
    pub(super) fn line(&self, count: u64, redop: &str, ratio: Option<f64>) -> String {
        let ratio = ratio.map_or(String::new(), |ratio| format!(" {:>6}x", short(ratio)));
        format!(
            "{:>11} {:>11} {:>13} {:>10} {:>8} {:>10} {:>10} {:>10} {:>6}{ratio}",
            self.bytes,
            count,
            self.dtype,
            redop,
            self.backend,
            short(self.p50_us),
            short(self.algbw_gbps),
            short(self.busbw_gbps),
            self.wrong
        )
    }
}

/// About four significant digits, never in scientific notation.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v < 10.0 => 3,
        v if v < 100.0 => 2,
        v if v < 1000.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        let (algbw_gbps, busbw_gbps) = bandwidth(Op::AllReduce, 64 << 20, 4, 32_000.0);
        Row {
            backend: "podring",
            op: "all_reduce",
            dtype: "float32",
            bytes: 64 << 20,
            ranks: 4,
            hosts: 1,
            p50_us: 32_000.0,
            algbw_gbps,
            busbw_gbps,
            wrong: 0,
        }
    }

    #[test]
    fn bandwidth_is_bytes_over_time() {
        let row = row();
        assert!((row.algbw_gbps - 2.097152).abs() < 1e-9);
        assert!((row.busbw_gbps - 3.145728).abs() < 1e-9);
        assert_eq!(bandwidth(Op::Barrier, 0, 4, 10.0), (0.0, 0.0));
        assert_eq!(bandwidth(Op::AllReduce, 8, 2, 0.0), (0.0, 0.0));
    }

    #[test]
    fn json_has_exactly_the_promised_keys() {
        let text = serde_json::to_string(&[row()]).unwrap();
        assert!(text.starts_with(
            r#"[{"backend":"podring","op":"all_reduce","dtype":"float32","bytes":67108864,"ranks":4,"hosts":1,"p50_us":32000.0,"algbw_gbps":2.0"#
        ));
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut keys: Vec<&str> = value[0].as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(
            keys,
            ["algbw_gbps", "backend", "busbw_gbps", "bytes", "dtype", "hosts", "op", "p50_us", "ranks", "wrong"]
        );
    }

    #[test]
    fn columns_line_up() {
        let head = header(true).chars().count();
        assert_eq!(row().line(16 << 20, "SUM", Some(15.2)).chars().count(), head);
        assert_eq!(row().line(16 << 20, "SUM", None).chars().count(), header(false).chars().count());
    }

    #[test]
    fn four_digits_or_so() {
        assert_eq!(short(0.0123), "0.012");
        assert_eq!(short(12.345), "12.35");
        assert_eq!(short(123.45), "123.5");
        assert_eq!(short(123456.7), "123457");
    }
}
