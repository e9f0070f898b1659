//! Every published number that the model rests on, with its source and the date of the source as read.
//!
//! Rates are decimal (1 GB/s = 1e9 bytes per second), one way, per link or per chip as the name says.

/// A number and where it is from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cited {
    /// The value in the unit of its field.
    pub value: f64,
    /// Public source.
    pub source: &'static str,
    /// Date of the source (publication, or last update as read).
    pub date: &'static str,
    /// How the value follows from the source; says so where it is our fit or assumption.
    pub note: &'static str,
}

const fn cited(value: f64, source: &'static str, date: &'static str, note: &'static str) -> Cited {
    Cited { value, source, date, note }
}

/// The numbers of one generation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// ICI links per chip.
    pub links_per_chip: Cited,
    /// ICI bandwidth of one link in one direction, bytes per second.
    pub link: Cited,
    /// Latency of one ICI hop, microseconds.
    pub hop: Cited,
    /// Fixed cost of one collective (launch, first and last synchronisation), microseconds.
    pub launch: Cited,
    /// Share of `link` that large collectives reach, 0 to 1.
    pub achieved: Cited,
    /// Between the two devices of one chip, one way, bytes per second; none where a chip is one device.
    pub core_to_core: Option<Cited>,
    /// Data-centre network, per chip and direction, bytes per second.
    pub dcn: Cited,
    /// One-way latency of the data-centre network, microseconds.
    pub dcn_latency: Cited,
}

const BOOK: &str = "Austin et al., How to Scale Your Model, part 2 (jax-ml.github.io/scaling-book/tpus)";
const BOOK_COMMS: &str = "Austin et al., How to Scale Your Model, part 3 (jax-ml.github.io/scaling-book/sharding)";
const BOOK_DATE: &str = "2025-02-04 (commit 0819a7d of 2025-02-18)";
const DOC_V2: &str = "Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 63(7)";
const DOC_V4: &str = "docs.cloud.google.com/tpu/docs/v4";
const DOC_V5E: &str = "docs.cloud.google.com/tpu/docs/v5e";
const DOC_V5P: &str = "docs.cloud.google.com/tpu/docs/v5p";
const DOC_V6E: &str = "docs.cloud.google.com/tpu/docs/v6e";
const DOC_7X: &str = "docs.cloud.google.com/tpu/docs/tpu7x";
const DOC_DATE: &str = "2026 (page as stored)";
const BENCH_7X: &str =
    "github.com/AI-Hypercomputer/accelerator-microbenchmarks, Ironwood/guides/collectives/all_gather.md";
const BENCH_7X_DATE: &str = "2025-12 (commit 63b035b)";
const SWIFT: &str =
    "Kumar et al., Swift: Delay is Simple and Effective for Congestion Control in the Datacenter, SIGCOMM 2020";

const HOP: Cited = cited(1.0, BOOK_COMMS, BOOK_DATE, "\"typically around 1us\" per hop");
const LAUNCH_BOOK: Cited = cited(
    5.0,
    BOOK_COMMS,
    BOOK_DATE,
    "fit: a latency-bound v5e all-gather over 3 hops is given as about 8 us measured; 8 - 3 hops",
);
const ACHIEVED_ASSUMED: Cited = cited(
    0.86,
    BOOK_COMMS,
    BOOK_DATE,
    "assumed: no public measurement of this generation; midpoint of the v5e and tpu7x fits",
);
const DCN_BOOK: Cited = cited(6.25e9, BOOK, BOOK_DATE, "2.5e10 bytes/s per host of 4 chips");
const DCN_LATENCY: Cited = cited(
    25.0,
    SWIFT,
    "2020-08",
    "assumed: no published one-way latency was found; half of the abstract's 50 us tail latency of short RPCs (hosts \
     included, load near 100 %, less than 3 times the minimum)",
);

/// v2.
pub const V2: Rates = Rates {
    links_per_chip: cited(4.0, DOC_V2, "2020-07", "2-D torus, four links"),
    link: cited(
        62.0e9,
        DOC_V2,
        "2020-07",
        "496 Gb/s per link and direction, read in public notes on the paper, not in the paper itself; fits its 15.9 Tb/s \
         across the 32 links that halve 16x16, and 500 Gb/s in Norrie et al., IEEE Micro 41(2), 2021",
    ),
    hop: HOP,
    launch: LAUNCH_BOOK,
    achieved: ACHIEVED_ASSUMED,
    core_to_core: Some(cited(
        350.0e9,
        DOC_V2,
        "2020-07",
        "assumed: half of the chip's 700 GB/s of HBM (read and write)",
    )),
    dcn: DCN_BOOK,
    dcn_latency: DCN_LATENCY,
};

/// v3.
pub const V3: Rates = Rates {
    links_per_chip: cited(4.0, DOC_V2, "2020-07", "2-D torus, four links"),
    link: cited(
        82.0e9,
        DOC_V2,
        "2020-07",
        "656 Gb/s per link and direction; agrees with docs.cloud.google.com/tpu/docs/v3: 340 TB/s over 1024 chips of 4 links; \
         others say 70 GB/s (TPU v4 paper, table 4, by public notes) and 100 GB/s (How to Scale Your Model, part 2)",
    ),
    core_to_core: Some(cited(
        450.0e9,
        DOC_V2,
        "2020-07",
        "assumed: half of the chip's 900 GB/s of HBM (read and write)",
    )),
    ..V2
};

/// v4.
pub const V4: Rates = Rates {
    links_per_chip: cited(6.0, DOC_V4, DOC_DATE, "3-D torus, six links"),
    link: cited(
        45.0e9,
        BOOK,
        BOOK_DATE,
        "4.5e10 one-way per link; agrees with the product page's 1.1 PB/s over 4096 chips of 6 links; the TPU v4 paper's \
         table 4 says 50 GB/s (by public notes)",
    ),
    hop: HOP,
    launch: LAUNCH_BOOK,
    achieved: ACHIEVED_ASSUMED,
    core_to_core: Some(cited(
        600.0e9,
        DOC_V4,
        DOC_DATE,
        "assumed: half of the chip's 1200 GB/s of HBM (read and write)",
    )),
    dcn: DCN_BOOK,
    dcn_latency: DCN_LATENCY,
};

/// v5e.
pub const V5E: Rates = Rates {
    links_per_chip: cited(4.0, DOC_V5E, DOC_DATE, "4 ICI ports per chip"),
    link: cited(
        45.0e9,
        BOOK,
        BOOK_DATE,
        "4.5e10 one-way per link; the product page gives 400 GB/s for 4 links both ways",
    ),
    hop: HOP,
    launch: LAUNCH_BOOK,
    achieved: cited(
        0.824,
        BOOK_COMMS,
        BOOK_DATE,
        "fit: 560 us computed at full rate and 680 us measured for a 34 MB all-gather on 4 chips in a line",
    ),
    core_to_core: None,
    dcn: cited(3.125e9, DOC_V5E, DOC_DATE, "6.4 Tb/s per pod of 256 chips"),
    dcn_latency: DCN_LATENCY,
};

/// v5p.
pub const V5P: Rates = Rates {
    links_per_chip: cited(6.0, DOC_V5P, DOC_DATE, "3-D torus, six links"),
    link: cited(
        90.0e9,
        BOOK,
        BOOK_DATE,
        "9e10 one-way per link; the product page gives 1200 GB/s for 6 links both ways",
    ),
    hop: HOP,
    launch: LAUNCH_BOOK,
    achieved: ACHIEVED_ASSUMED,
    core_to_core: None,
    dcn: cited(6.25e9, DOC_V5P, DOC_DATE, "50 Gb/s per chip"),
    dcn_latency: DCN_LATENCY,
};

/// v6e.
pub const V6E: Rates = Rates {
    links_per_chip: cited(4.0, DOC_V6E, DOC_DATE, "4 ICI ports per chip"),
    link: cited(90.0e9, BOOK, BOOK_DATE, "9e10 one-way per link; the product page gives 3200 Gb/s for 4 links"),
    hop: HOP,
    launch: LAUNCH_BOOK,
    achieved: ACHIEVED_ASSUMED,
    core_to_core: None,
    dcn: cited(12.5e9, DOC_V6E, DOC_DATE, "25.6 Tb/s per pod of 256 chips"),
    dcn_latency: DCN_LATENCY,
};

/// tpu7x.
pub const TPU7X: Rates = Rates {
    links_per_chip: cited(6.0, DOC_7X, DOC_DATE, "3-D torus, six links"),
    link: cited(100.0e9, DOC_7X, DOC_DATE, "1200 GB/s per chip over 6 links both ways"),
    hop: HOP,
    launch: cited(12.5, BENCH_7X, BENCH_7X_DATE, "fit: intercept of the published all-gather times, 0.25 to 64 MiB"),
    achieved: cited(0.905, BENCH_7X, BENCH_7X_DATE, "fit: slope of the published all-gather times, 0.25 to 64 MiB"),
    core_to_core: Some(cited(
        600.0e9,
        DOC_7X,
        DOC_DATE,
        "six times a 1-D ICI link, says the page's section on the dual-chiplet architecture (read in public quotations of it); \
         assumed: a link in one direction is meant, as the page gives no absolute rate",
    )),
    dcn: cited(12.5e9, DOC_7X, DOC_DATE, "100 Gb/s per chip"),
    dcn_latency: DCN_LATENCY,
};
