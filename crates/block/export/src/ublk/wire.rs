//! What is said to the ublk driver: the structures and numbers of `linux/ublk_cmd.h`, as far as they are used here.

use std::mem::{offset_of, size_of};

use rustix::ioctl::opcode;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Sectors of requests, sizes and discards, whatever the device's block size.
pub(super) const SECTOR: u64 = 512;

/// After the death of its server, a device keeps what is asked of it for the next one.
pub(super) const USER_RECOVERY: u64 = 1 << 3;
/// And gives the next one also what the dead one was doing.
pub(super) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// Commands are numbered like ioctls.
pub(super) const CMD_IOCTL_ENCODE: u64 = 1 << 6;
/// Data is read from and written to the character device, by any thread (Linux 6.5).
pub(super) const USER_COPY: u64 = 1 << 7;
/// The size of a live device can be changed (Linux 6.16).
pub(super) const UPDATE_SIZE: u64 = 1 << 10;

/// Nobody serves it, and nobody did: it was added only.
pub(super) const STATE_DEAD: u16 = 0;

/// To the control device.
pub(super) mod control {
    use super::{ControlCommand, opcode};

    pub(in super::super) const GET_DEV_INFO: u32 = opcode::read::<ControlCommand>(b'u', 0x02);
    pub(in super::super) const ADD_DEV: u32 = opcode::read_write::<ControlCommand>(b'u', 0x04);
    pub(in super::super) const DEL_DEV: u32 = opcode::read_write::<ControlCommand>(b'u', 0x05);
    pub(in super::super) const START_DEV: u32 = opcode::read_write::<ControlCommand>(b'u', 0x06);
    pub(in super::super) const STOP_DEV: u32 = opcode::read_write::<ControlCommand>(b'u', 0x07);
    pub(in super::super) const SET_PARAMS: u32 = opcode::read_write::<ControlCommand>(b'u', 0x08);
    pub(in super::super) const START_USER_RECOVERY: u32 = opcode::read_write::<ControlCommand>(b'u', 0x10);
    pub(in super::super) const END_USER_RECOVERY: u32 = opcode::read_write::<ControlCommand>(b'u', 0x11);
    pub(in super::super) const GET_FEATURES: u32 = opcode::read::<ControlCommand>(b'u', 0x13);
    /// Linux 6.9
    pub(in super::super) const DEL_DEV_ASYNC: u32 = opcode::read::<ControlCommand>(b'u', 0x14);
    pub(in super::super) const UPDATE_SIZE: u32 = opcode::read_write::<ControlCommand>(b'u', 0x15);
}

/// To a device's queue.
pub(super) const FETCH_REQ: u32 = opcode::read_write::<IoCommand>(b'u', 0x20);
/// Answers a request, and waits for the next one of its tag.
pub(super) const COMMIT_AND_FETCH_REQ: u32 = opcode::read_write::<IoCommand>(b'u', 0x21);

/// What a request asks for: the low byte of [`Descriptor::op_flags`].
pub(super) mod operation {
    pub(in super::super) const READ: u8 = 0;
    pub(in super::super) const WRITE: u8 = 1;
    pub(in super::super) const FLUSH: u8 = 2;
    pub(in super::super) const DISCARD: u8 = 3;
    pub(in super::super) const WRITE_ZEROES: u8 = 5;
}

/// `struct ublksrv_ctrl_cmd`
#[derive(Debug, Clone, Copy, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct ControlCommand {
    pub(super) dev_id: u32,
    /// None in particular: all bits set.
    pub(super) queue_id: u16,
    /// Length of what is at `addr`.
    pub(super) len: u16,
    pub(super) addr: u64,
    pub(super) data: u64,
    pub(super) dev_path_len: u16,
    pub(super) pad: u16,
    pub(super) reserved: u32,
}

/// `struct ublksrv_ctrl_dev_info`
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct DeviceInfo {
    pub(super) nr_hw_queues: u16,
    pub(super) queue_depth: u16,
    pub(super) state: u16,
    pub(super) pad0: u16,
    pub(super) max_io_buf_bytes: u32,
    pub(super) dev_id: u32,
    pub(super) ublksrv_pid: i32,
    pub(super) pad1: u32,
    pub(super) flags: u64,
    /// The server's own: the driver keeps it and does not look.
    pub(super) ublksrv_flags: u64,
    pub(super) owner: [u32; 2],
    pub(super) reserved1: u64,
    pub(super) reserved2: u64,
}

/// The beginning of `struct ublk_params`, which the driver takes for the whole.
#[derive(Debug, Clone, Copy, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Parameters {
    pub(super) len: u32,
    pub(super) types: u32,
    pub(super) basic: BasicParameters,
    pub(super) discard: DiscardParameters,
    /// The first field of a part that `types` does not announce.
    pub(super) unused: u32,
}

/// `types`: both that there are here.
pub(super) const BASIC_AND_DISCARD: u32 = 1 << 0 | 1 << 1;

/// `struct ublk_param_basic`
#[derive(Debug, Clone, Copy, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct BasicParameters {
    pub(super) attrs: u32,
    pub(super) logical_bs_shift: u8,
    pub(super) physical_bs_shift: u8,
    pub(super) io_opt_shift: u8,
    pub(super) io_min_shift: u8,
    pub(super) max_sectors: u32,
    pub(super) chunk_sectors: u32,
    pub(super) dev_sectors: u64,
    pub(super) virt_boundary_mask: u64,
}

/// `attrs`: the kernel refuses writes.
pub(super) const READ_ONLY: u32 = 1 << 0;
/// `attrs`: what was written is durable after a flush only.
pub(super) const VOLATILE_CACHE: u32 = 1 << 2;

/// `struct ublk_param_discard`
#[derive(Debug, Clone, Copy, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct DiscardParameters {
    pub(super) discard_alignment: u32,
    pub(super) discard_granularity: u32,
    pub(super) max_discard_sectors: u32,
    pub(super) max_write_zeroes_sectors: u32,
    pub(super) max_discard_segments: u16,
    pub(super) reserved0: u16,
}

/// `struct ublksrv_io_desc`: a request, in memory that the driver writes.
#[derive(Debug, Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Descriptor {
    pub(super) op_flags: u32,
    pub(super) nr_sectors: u32,
    pub(super) start_sector: u64,
    pub(super) addr: u64,
}

/// `struct ublksrv_io_cmd`
#[derive(Debug, Clone, Copy, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct IoCommand {
    pub(super) q_id: u16,
    pub(super) tag: u16,
    pub(super) result: i32,
    pub(super) addr: u64,
}

/// Where in the character device the data of a request is, with [`USER_COPY`].
pub(super) fn data_position(queue: u16, tag: u16) -> u64 {
    const BUFFERS: u64 = 0x8000_0000;
    BUFFERS + (u64::from(queue) << 41 | u64::from(tag) << 25)
}

/// Where in the character device the descriptors of a queue are mapped from: each queue has room for the deepest.
pub(super) fn descriptors_position(queue: u16) -> u64 {
    const DEEPEST: u64 = 4096;
    const { assert!((DEEPEST * size_of::<Descriptor>() as u64).is_multiple_of(4096)) };
    u64::from(queue) * DEEPEST * size_of::<Descriptor>() as u64
}

const _: () = {
    assert!(size_of::<ControlCommand>() == 32 && offset_of!(ControlCommand, data) == 16);
    assert!(size_of::<DeviceInfo>() == 64 && offset_of!(DeviceInfo, ublksrv_flags) == 32);
    assert!(size_of::<Parameters>() == 64 && offset_of!(Parameters, discard) == 40);
    assert!(size_of::<BasicParameters>() == 32 && offset_of!(BasicParameters, dev_sectors) == 16);
    assert!(size_of::<DiscardParameters>() == 20);
    assert!(size_of::<Descriptor>() == 24 && offset_of!(Descriptor, start_sector) == 8);
    assert!(size_of::<IoCommand>() == 16 && offset_of!(IoCommand, addr) == 8);
    // As the header's macros give them on x86-64 and aarch64.
    assert!(control::ADD_DEV == 0xC020_7504 && control::GET_DEV_INFO == 0x8020_7502);
    assert!(FETCH_REQ == 0xC010_7520 && COMMIT_AND_FETCH_REQ == 0xC010_7521);
};
