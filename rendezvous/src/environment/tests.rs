use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

type Variables<'a> = &'a [(&'a str, &'a str)];

fn read(variables: Variables<'_>) -> Result<Launch> {
    let map: BTreeMap<&str, &str> = variables.iter().copied().collect();
    Launch::read(|name| map.get(name).map(|value| (*value).to_owned()))
}

fn value<T: Clone>(given: &Option<Given<T>>) -> T {
    given.as_ref().expect("not given").value.clone()
}

#[test]
fn launchers() {
    // Variables, then rank, world size, local rank, local world size and the variable that gave the rank.
    let cases: &[(Variables<'_>, [u32; 4], &str)] = &[
        (
            &[("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4"), ("GROUP_RANK", "1")],
            [5, 8, 1, 4],
            "RANK",
        ),
        (
            &[
                ("OMPI_COMM_WORLD_RANK", "3"),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
                ("PMIX_RANK", "3"),
            ],
            [3, 4, 1, 2],
            "OMPI_COMM_WORLD_RANK",
        ),
        (
            &[("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "1")],
            [1, 2, 0, 1],
            "PMI_RANK",
        ),
        // srun starts a torchrun on each of two hosts.
        (
            &[
                ("RANK", "6"),
                ("WORLD_SIZE", "8"),
                ("LOCAL_RANK", "2"),
                ("LOCAL_WORLD_SIZE", "4"),
                ("SLURM_STEP_ID", "0"),
                ("SLURM_PROCID", "1"),
                ("SLURM_NTASKS", "2"),
                ("SLURM_NODEID", "1"),
                ("GROUP_RANK", "1"),
            ],
            [6, 8, 2, 4],
            "RANK",
        ),
    ];
    for (variables, expected, by) in cases {
        let launch = read(variables).unwrap_or_else(|error| panic!("{variables:?}: {error}"));
        let got = [&launch.rank, &launch.world_size, &launch.local_rank, &launch.local_world_size].map(value);
        assert_eq!(got, *expected, "{variables:?}");
        assert_eq!(launch.rank.unwrap().by, *by);
    }
    let slurm = [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "2"), ("SLURM_NTASKS", "4"), ("SLURM_LOCALID", "0")];
    let step = read(&slurm).unwrap();
    assert_eq!((value(&step.rank), value(&step.local_rank), step.local_world_size), (2, 0, None));
    // The batch script, or what it starts without srun: torchrun numbers as many processes otherwise.
    assert_eq!(read(&slurm[1..]), Ok(Launch::default()));
    let within = [&[("RANK", "3"), ("WORLD_SIZE", "4")], &slurm[1..]].concat();
    assert_eq!(value(&read(&within).unwrap().rank), 3);
    assert_eq!(read(&[]), Ok(Launch::default()));
    assert_eq!(read(&[("RANK", ""), ("WORLD_SIZE", " ")]), Ok(Launch::default()));
}

#[test]
fn an_outer_launcher_is_noted() {
    let torchrun = [("RANK", "6"), ("WORLD_SIZE", "8")];
    let srun = [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2")];
    let launch = read(&[&torchrun[..], &srun].concat()).unwrap();
    let [note] = &launch.notes[..] else { panic!("{:?}", launch.notes) };
    assert_eq!((note.decides.as_str(), note.other.as_str(), note.usual), ("RANK", "SLURM_PROCID", true));
    assert!(note.to_string().contains("WORLD_SIZE counts 8 processes, SLURM_NTASKS counts 2"), "{note}");
}

#[test]
fn slices_alone_make_ranks() {
    let two_slices = [
        ("MEGASCALE_SLICE_ID", "1"),
        ("MEGASCALE_NUM_SLICES", "2"),
        ("TPU_WORKER_ID", "0"),
        ("TPU_WORKER_HOSTNAMES", "a,b"),
        ("JOB_COMPLETION_INDEX", "0"),
        ("TPU_TOPOLOGY", "2x2x2"),
    ];
    let launch = read(&two_slices).unwrap();
    assert_eq!((value(&launch.rank), value(&launch.world_size)), (2, 4));
    assert_eq!(launch.rank.unwrap().by, "MEGASCALE_SLICE_ID, TPU_WORKER_ID, TPU_WORKER_HOSTNAMES");
    assert_eq!((value(&launch.host_index), value(&launch.host_count)), (2, 4));
    assert_eq!(value(&launch.topology), [2, 2, 2]);
    assert_eq!(launch.notes, []);
}

#[test]
fn tpu_processes_of_one_host_are_ranks() {
    let launch = read(&[
        ("CLOUD_TPU_TASK_ID", "3"),
        ("TPU_PROCESS_ADDRESSES", "localhost:8476,localhost:8477,localhost:8478,localhost:8479"),
        ("TPU_PROCESS_PORT", "8479"),
        ("TPU_PROCESS_BOUNDS", "2,2,1"),
        ("TPU_CHIPS_PER_PROCESS_BOUNDS", "1,1,1"),
        ("TPU_VISIBLE_CHIPS", "3"),
    ])
    .unwrap();
    assert_eq!((value(&launch.rank), value(&launch.world_size), launch.host_index), (3, 4, None));
}

#[test]
fn what_torch_tpu_sets_for_a_rank_contradicts_nothing() {
    // Rank 13 of two hosts with four tpu7x chips each, two devices to a chip; and rank 5 of four hosts with four chips.
    let addresses = |hosts: u16, each: u16| {
        let all = (0..hosts).flat_map(|host| (0..each).map(move |port| format!("t{host}:{}", 8070 + port)));
        all.collect::<Vec<_>>().join(",")
    };
    let (two, four) = (addresses(2, 8), addresses(4, 4));
    let tpu7x = [
        [("RANK", "13"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "5"), ("LOCAL_WORLD_SIZE", "8")],
        [("GROUP_RANK", "1"), ("GROUP_WORLD_SIZE", "2"), ("TPU_WORKER_ID", "1"), ("TPU_WORKER_HOSTNAMES", "t0,t1")],
        [
            ("CLOUD_TPU_TASK_ID", "13"),
            ("TPU_VISIBLE_CHIPS", "5"),
            ("TPU_VISIBLE_DEVICES", "5"),
            ("TPU_TOPOLOGY", "2x2x2"),
        ],
        [
            ("TPU_PROCESS_BOUNDS", "2,2,2,2"),
            ("TPU_HOST_BOUNDS", "2,2,2,2"),
            ("TPU_CHIPS_PER_PROCESS_BOUNDS", "1,1,1,1"),
            ("TPU_CHIPS_PER_HOST_BOUNDS", "1,1,1,1"),
        ],
        [
            ("TPU_PROCESS_ADDRESSES", &two),
            ("TPU_PROCESS_PORT", "8075"),
            ("MASTER_ADDR", "t0"),
            ("MASTER_PORT", "29400"),
        ],
    ];
    let v5e = [
        [("RANK", "5"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")],
        [
            ("GROUP_RANK", "1"),
            ("GROUP_WORLD_SIZE", "4"),
            ("TPU_WORKER_ID", "1"),
            ("TPU_WORKER_HOSTNAMES", "t0,t1,t2,t3"),
        ],
        [("CLOUD_TPU_TASK_ID", "5"), ("TPU_VISIBLE_CHIPS", "1"), ("TPU_VISIBLE_DEVICES", "1"), ("TPU_TOPOLOGY", "4x4")],
        [
            ("TPU_PROCESS_BOUNDS", "4,4,1"),
            ("TPU_HOST_BOUNDS", "4,4,1"),
            ("TPU_CHIPS_PER_PROCESS_BOUNDS", "1,1,1"),
            ("TPU_CHIPS_PER_HOST_BOUNDS", "1,1,1"),
        ],
        [
            ("TPU_PROCESS_ADDRESSES", &four),
            ("TPU_PROCESS_PORT", "8071"),
            ("MASTER_ADDR", "t0"),
            ("MASTER_PORT", "29400"),
        ],
    ];
    for (variables, rank) in [(tpu7x, 13), (v5e, 5)] {
        let launch = read(&variables.concat()).unwrap();
        assert_eq!((value(&launch.rank), value(&launch.world_size), value(&launch.worker)), (rank, 16, 1));
        assert_eq!(launch.notes, []);
    }
}

#[test]
fn numbers_that_do_not_fit_tell_no_rank() {
    let launch = read(&[
        ("MEGASCALE_SLICE_ID", "4294967294"),
        ("MEGASCALE_NUM_SLICES", "4294967295"),
        ("TPU_WORKER_ID", "1"),
        ("TPU_WORKER_HOSTNAMES", "a,b"),
    ])
    .unwrap();
    assert_eq!((launch.rank, launch.world_size), (None, None));
}

#[test]
fn the_job_is_told_where_launcher_and_slice_disagree() {
    let launch = read(&[
        ("RANK", "0"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("GROUP_RANK", "0"),
        ("TPU_WORKER_ID", "1"),
        ("JOB_COMPLETION_INDEX", "0"),
        ("TPU_WORKER_HOSTNAMES", "a,b"),
    ])
    .unwrap();
    let names: Vec<_> = launch.notes.iter().map(|note| (note.decides.as_str(), note.other.as_str())).collect();
    let expected = [("TPU_WORKER_ID", "JOB_COMPLETION_INDEX"), ("GROUP_RANK", "TPU_WORKER_ID, TPU_WORKER_HOSTNAMES")];
    assert_eq!(names, expected);
    assert!(launch.notes.iter().all(|note| !note.usual), "{:?}", launch.notes);
    assert_eq!((value(&launch.rank), value(&launch.worker)), (0, 1));
}

#[test]
fn contradictions_name_both_variables() {
    let cases: &[(Variables<'_>, &str, &str)] = &[
        (&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK", "WORLD_SIZE"),
        (
            &[("RANK", "1"), ("WORLD_SIZE", "2"), ("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")],
            "RANK",
            "SLURM_PROCID",
        ),
        (
            &[("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "1")],
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
        ),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "4")],
            "LOCAL_WORLD_SIZE",
            "WORLD_SIZE",
        ),
        (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")], "LOCAL_RANK", "RANK"),
        (&[("GROUP_RANK", "1"), ("SLURM_NODEID", "0")], "GROUP_RANK", "SLURM_NODEID"),
        (&[("GROUP_RANK", "2"), ("GROUP_WORLD_SIZE", "2")], "GROUP_RANK", "GROUP_WORLD_SIZE"),
        (&[("TPU_WORKER_ID", "2"), ("TPU_WORKER_HOSTNAMES", "a,b")], "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"),
        (&[("MEGASCALE_SLICE_ID", "2"), ("MEGASCALE_NUM_SLICES", "2")], "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES"),
        (
            &[("CLOUD_TPU_TASK_ID", "1"), ("TPU_PROCESS_ADDRESSES", "h:1,[::1]:2"), ("TPU_PROCESS_PORT", "1")],
            "TPU_PROCESS_PORT",
            "TPU_PROCESS_ADDRESSES",
        ),
        (
            &[("CLOUD_TPU_TASK_ID", "2"), ("TPU_PROCESS_ADDRESSES", "h:1,h:2")],
            "CLOUD_TPU_TASK_ID",
            "TPU_PROCESS_ADDRESSES",
        ),
        (&[("CLOUD_TPU_TASK_ID", "1"), ("TPU_WORKER_HOSTNAMES", "a")], "CLOUD_TPU_TASK_ID", "TPU_WORKER_HOSTNAMES"),
        (&[("TPU_VISIBLE_CHIPS", "0,1"), ("TPU_VISIBLE_DEVICES", "0")], "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"),
        (&[("TPU_PROCESS_BOUNDS", "1,1,1"), ("TPU_HOST_BOUNDS", "2,1,1")], "TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS"),
        (
            &[("TPU_CHIPS_PER_PROCESS_BOUNDS", "2,2,1"), ("TPU_VISIBLE_CHIPS", "0")],
            "TPU_CHIPS_PER_PROCESS_BOUNDS",
            "TPU_VISIBLE_CHIPS",
        ),
        (
            &[("TPU_PROCESS_BOUNDS", "2,1,1"), ("TPU_PROCESS_ADDRESSES", "h:1")],
            "TPU_PROCESS_BOUNDS",
            "TPU_PROCESS_ADDRESSES",
        ),
        (
            &[("TPU_PROCESS_BOUNDS", "1,1,2"), ("TPU_CHIPS_PER_PROCESS_BOUNDS", "2,2,1"), ("TPU_TOPOLOGY", "4x4")],
            "TPU_PROCESS_BOUNDS",
            "TPU_TOPOLOGY",
        ),
    ];
    for (variables, first, second) in cases {
        match read(variables) {
            Err(EnvironmentError::Contradiction { first: a, second: b, .. }) => {
                assert_eq!((a.as_str(), b.as_str()), (*first, *second), "{variables:?}");
            }
            other => panic!("{variables:?}: {other:?}"),
        }
    }
    let text = read(cases[0].0).unwrap_err().to_string();
    assert!(text.contains("RANK=\"2\" and WORLD_SIZE=\"2\" contradict each other"), "{text}");
}

#[test]
fn half_of_a_pair_and_malformed_values() {
    for (variables, expected) in [
        (vec![("RANK", "0")], "WORLD_SIZE isn't"),
        (vec![("OMPI_COMM_WORLD_RANK", "0")], "the world size isn't"),
        (vec![("MEGASCALE_SLICE_ID", "0")], "MEGASCALE_NUM_SLICES isn't"),
        (vec![("MEGASCALE_NUM_SLICES", "2")], "MEGASCALE_SLICE_ID isn't"),
        (vec![("TPU_WORKER_ID", "0"), ("TPU_WORKER_HOSTNAMES", "a"), ("LOCAL_RANK", "3")], "LOCAL_WORLD_SIZE isn't"),
        (vec![("TPU_WORKER_ID", "0"), ("TPU_WORKER_HOSTNAMES", "a"), ("LOCAL_WORLD_SIZE", "4")], "LOCAL_RANK isn't"),
        (vec![("RANK", "-1"), ("WORLD_SIZE", "1")], "RANK=\"-1\": expected a number"),
        (vec![("RANK", "+1"), ("WORLD_SIZE", "2")], "RANK=\"+1\""),
        (vec![("RANK", "0"), ("WORLD_SIZE", "99999999999")], "WORLD_SIZE=\"99999999999\""),
        (vec![("MASTER_PORT", "70000")], "MASTER_PORT"),
        (vec![("TPU_WORKER_HOSTNAMES", "a,,b")], "TPU_WORKER_HOSTNAMES"),
        (vec![("TPU_PROCESS_ADDRESSES", "::1:5")], "TPU_PROCESS_ADDRESSES"),
        (vec![("TPU_PROCESS_BOUNDS", "2,2")], "TPU_PROCESS_BOUNDS"),
        (vec![("TPU_PROCESS_BOUNDS", "0,2,1")], "TPU_PROCESS_BOUNDS"),
        (vec![("TPU_VISIBLE_CHIPS", "0,0")], "TPU_VISIBLE_CHIPS"),
        (vec![("TPU_TOPOLOGY", "4")], "TPU_TOPOLOGY"),
    ] {
        let error = read(&variables).expect_err(expected).to_string();
        assert!(error.contains(expected), "{variables:?}: {error}");
    }
}

#[test]
fn the_documentation_has_this_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/environment.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (begin, end) = ("<!-- variables -->\n", "<!-- end -->");
    let from = text.find(begin).expect("no begin mark") + begin.len();
    let to = text.find(end).expect("no end mark");
    if std::env::var_os("PODRING_UPDATE_DOCS").is_some() {
        std::fs::write(path, [&text[..from], &table::markdown(), &text[to..]].concat()).unwrap();
        return;
    }
    assert_eq!(text[from..to], table::markdown(), "PODRING_UPDATE_DOCS=1 cargo test writes docs/environment.md anew");
    let mut names: Vec<_> = VARIABLES.iter().map(|variable| variable.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), VARIABLES.len(), "a variable is listed twice");
}

proptest! {
    /// Whatever is set: an answer or an error, and a rank only below its world size.
    #[test]
    fn nothing_panics(set in proptest::collection::btree_map(0..VARIABLES.len(), "[0-9]{1,3}|[0-9],[0-9],[0-9]|[a-z:x,0-9]{0,6}|[0-9]{9,12}", 0..12)) {
        let lookup = |name: &str| {
            let index = VARIABLES.iter().position(|variable| variable.name == name)?;
            set.get(&index).cloned()
        };
        if let Ok(launch) = Launch::read(lookup)
            && let (Some(rank), Some(size)) = (launch.rank, launch.world_size)
        {
            prop_assert!(rank.value < size.value);
        }
    }
}
