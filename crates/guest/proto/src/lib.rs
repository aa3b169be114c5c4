//! What crosses the wire between node and guest, and nothing else: the envd services, the body of `POST /init`, and the
//! boot parameters on the kernel command line.

#![forbid(unsafe_code)]

mod boot;
mod call;
mod init;
mod process;
/// Generated from `proto/`: messages, service traits and clients of the envd services.
#[allow(missing_debug_implementations, unreachable_pub, unused_qualifications, clippy::all, reason = "generated code")]
pub mod wire {
    connectrpc::include_generated!();
}

pub use boot::{BootParams, ParseBootParamsError};
pub use call::{OUTPUT_GRACE, OUTPUT_REPLAY, credentials};
pub use init::InitRequest;
pub use process::{MESSAGES, NewProcess, ProcessEnd, ProcessReader, Refusal, StreamProblem, Told};

/// The guest agent's TCP port, fixed by the SDKs.
pub const ENVD_PORT: u16 = 49983;

/// What the agent reports as its version: the envd release whose behaviour it has. SDKs gate features on it.
pub const ENVD_VERSION: &str = "0.6.13";
