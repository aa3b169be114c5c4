//! `process.Process`: the protocol's view of [`crate::process`].

use std::sync::Arc;
use std::time::Duration;

use aenv_guest_proto::wire::process as wire;
use aenv_guest_proto::{OUTPUT_GRACE, OUTPUT_REPLAY};
use connectrpc::{ConnectError, InboundStream, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream};
use futures::StreamExt as _;
use nix::sys::signal::Signal;
use wire::__buffa::oneof;
use wire::process_event::{DataEvent, EndEvent, KeepAlive, StartEvent};

use super::stream::{Events, Pace, stream};
use super::{Envd, environment};
use crate::console::Chain;
use crate::process::{
    Channel, Chunk, Config, Exit, Followed, InputError, Limits, Program, Running, Selector, Source, Subscription,
    TerminalSize,
};

/// Terminal size when the caller gives none.
const DEFAULT_SIZE: TerminalSize = TerminalSize { columns: 80, rows: 24 };

/// The service; stateless beside the daemon's state.
#[derive(Debug)]
pub(super) struct ProcessService {
    envd: Arc<Envd>,
}

impl ProcessService {
    pub(super) fn new(envd: Arc<Envd>) -> Self {
        Self { envd }
    }

    fn find(&self, selector: Option<&wire::ProcessSelector>) -> Result<Arc<Running>, ConnectError> {
        let selector = read_selector(selector)?;
        self.envd.processes.find(&selector).ok_or_else(|| not_found(&selector))
    }

    /// What to run, as the request and the sandbox's settings say together.
    fn program(
        &self,
        context: &RequestContext,
        request: wire::StartRequest,
    ) -> Result<(Program, Config), ConnectError> {
        let process =
            request.process.into_option().ok_or_else(|| ConnectError::invalid_argument("process is required"))?;
        let cwd = process.cwd.as_deref().unwrap_or_default();
        let (user, mut directory) = self.envd.rpc_path(context, cwd)?;
        if cwd.is_empty() && !directory.is_dir() {
            // Nobody asked for it: an image may come without its user's home.
            directory = "/".into();
        }
        if !directory.is_dir() {
            return Err(ConnectError::invalid_argument(format!("cwd '{}' does not exist", directory.display())));
        }
        let channel = match request.pty.into_option() {
            Some(pty) => Channel::Terminal(pty.size.as_option().map_or(DEFAULT_SIZE, read_size)),
            None => Channel::Pipes { stdin: request.stdin.unwrap_or(true) },
        };
        let request_env = process.envs.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
        let environment = environment::compose(&user, self.envd.settings.global_env(), request_env);
        let config = Config {
            command: process.cmd,
            arguments: process.args,
            environment: process.envs.into_iter().collect(),
            directory: process.cwd,
            tag: request.tag,
        };
        let program = Program {
            command: config.command.clone(),
            arguments: config.arguments.clone(),
            environment,
            directory,
            user,
            channel,
        };
        Ok((program, config))
    }
}

#[allow(refining_impl_trait, reason = "plain messages say more than what they can be encoded as")]
impl wire::Process for ProcessService {
    async fn list(
        &self,
        ctx: RequestContext,
        _request: ServiceRequest<'_, wire::ListRequest>,
    ) -> ServiceResult<wire::ListResponse> {
        Envd::check_rpc_user(&ctx)?;
        let processes = self.envd.processes.list().iter().map(|process| describe(process)).collect();
        Response::ok(wire::ListResponse { processes, ..Default::default() })
    }

    async fn connect(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::ConnectRequest>,
    ) -> ServiceResult<ServiceStream<wire::ConnectResponse>> {
        Envd::check_rpc_user(&ctx)?;
        let replay = number(&ctx, OUTPUT_REPLAY)?.map_or(usize::MAX, |bytes| bytes as usize);
        let request = request.to_owned_message();
        let selector = read_selector(request.process.as_option())?;
        let process = self.envd.processes.find_or_recall(&selector).ok_or_else(|| not_found(&selector))?;
        let events = ProcessEvents { subscription: process.subscribe(replay), ended: false, owns_deadline: false };
        let stream = stream(events, Pace::of(&ctx))
            .map(|event| event.map(|event| wire::ConnectResponse { event: event.into(), ..Default::default() }));
        Response::ok(Box::pin(stream))
    }

    async fn start(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::StartRequest>,
    ) -> ServiceResult<ServiceStream<wire::StartResponse>> {
        // The library takes an unreadable timeout for none: that would be a process that nothing ends.
        number(&ctx, "connect-timeout-ms")?;
        let output_grace = number(&ctx, OUTPUT_GRACE)?.map(Duration::from_millis);
        let (program, config) = self.program(&ctx, request.to_owned_message())?;
        let pace = Pace::of(&ctx);
        let limits = Limits { deadline: pace.deadline, output_grace };
        let (command, terminal) = (program.command.clone(), matches!(program.channel, Channel::Terminal(_)));
        let subscription = self.envd.processes.start(program, config, limits).await.map_err(|error| {
            let what = if terminal { "error starting pty with command" } else { "error starting process" };
            ConnectError::invalid_argument(format!("{what} '{command}': {}", Chain(&error)))
        })?;
        let events = ProcessEvents { subscription, ended: false, owns_deadline: true };
        let stream = stream(events, pace)
            .map(|event| event.map(|event| wire::StartResponse { event: event.into(), ..Default::default() }));
        Response::ok(Box::pin(stream))
    }

    async fn update(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::UpdateRequest>,
    ) -> ServiceResult<wire::UpdateResponse> {
        Envd::check_rpc_user(&ctx)?;
        let request = request.to_owned_message();
        let process = self.find(request.process.as_option())?;
        if let Some(size) = request.pty.as_option().and_then(|pty| pty.size.as_option()) {
            process.resize(read_size(size)).map_err(input_error)?;
        }
        Response::ok(wire::UpdateResponse::default())
    }

    async fn stream_input(
        &self,
        ctx: RequestContext,
        mut requests: InboundStream<wire::StreamInputRequest>,
    ) -> ServiceResult<wire::StreamInputResponse> {
        use oneof::stream_input_request::Event;

        Envd::check_rpc_user(&ctx)?;
        let mut process = None;
        while let Some(request) = requests.next().await {
            let request = request.map_err(|error| ConnectError::unknown(format!("error streaming input: {error}")))?;
            match request.to_owned_message().event {
                Some(Event::Start(start)) => process = Some(self.find(start.process.as_option())?),
                Some(Event::Data(data)) => {
                    let process = process
                        .as_ref()
                        .ok_or_else(|| ConnectError::failed_precondition("input data before the start event"))?;
                    write_input(process, data.input.into_option()).await?;
                }
                Some(Event::Keepalive(_)) => {}
                None => return Err(ConnectError::unimplemented("invalid event type")),
            }
        }
        Response::ok(wire::StreamInputResponse::default())
    }

    async fn send_input(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::SendInputRequest>,
    ) -> ServiceResult<wire::SendInputResponse> {
        Envd::check_rpc_user(&ctx)?;
        let request = request.to_owned_message();
        let process = self.find(request.process.as_option())?;
        write_input(&process, request.input.into_option()).await?;
        Response::ok(wire::SendInputResponse::default())
    }

    async fn send_signal(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::SendSignalRequest>,
    ) -> ServiceResult<wire::SendSignalResponse> {
        Envd::check_rpc_user(&ctx)?;
        let request = request.to_owned_message();
        let process = self.find(request.process.as_option())?;
        let signal = match request.signal.to_i32() {
            9 => Signal::SIGKILL,
            15 => Signal::SIGTERM,
            other => return Err(ConnectError::unimplemented(format!("invalid signal: {other}"))),
        };
        let sent = process.signal(signal).await;
        sent.map_err(|errno| ConnectError::internal(format!("error sending signal: {errno}")))?;
        Response::ok(wire::SendSignalResponse::default())
    }

    async fn close_stdin(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::CloseStdinRequest>,
    ) -> ServiceResult<wire::CloseStdinResponse> {
        Envd::check_rpc_user(&ctx)?;
        let request = request.to_owned_message();
        self.find(request.process.as_option())?.close_stdin().await.map_err(input_error)?;
        Response::ok(wire::CloseStdinResponse::default())
    }
}

/// The events of one process for one follower.
struct ProcessEvents {
    subscription: Subscription,
    ended: bool,
    /// The stream's deadline is the process's: Start, as opposed to Connect.
    owns_deadline: bool,
}

impl Events for ProcessEvents {
    type Message = wire::ProcessEvent;

    fn start(&mut self) -> wire::ProcessEvent {
        event(StartEvent { pid: self.subscription.process.pid.cast_unsigned(), ..Default::default() })
    }

    fn keepalive(&self) -> wire::ProcessEvent {
        event(KeepAlive::default())
    }

    async fn next(&mut self) -> Option<Result<wire::ProcessEvent, ConnectError>> {
        if self.ended {
            return None;
        }
        let message = match self.subscription.next().await {
            Followed::Output(chunk) => return Some(Ok(data_event(chunk))),
            Followed::Ended(exit) => Ok(event(end_event(exit))),
            Followed::Expired if self.owns_deadline => {
                Err(ConnectError::deadline_exceeded("context deadline exceeded"))
            }
            Followed::Expired => Ok(event(end_event(Exit::Signal(Signal::SIGKILL as i32)))),
        };
        self.ended = true;
        Some(message)
    }

    async fn expire(&mut self) {
        if self.owns_deadline {
            self.subscription.process.expire();
            self.subscription.process.wait_reaped().await;
        }
    }
}

fn event(event: impl Into<oneof::process_event::Event>) -> wire::ProcessEvent {
    wire::ProcessEvent { event: Some(event.into()), ..Default::default() }
}

fn data_event(chunk: Chunk) -> wire::ProcessEvent {
    use oneof::process_event::data_event::Output;

    let bytes = chunk.bytes.to_vec();
    let output = match chunk.source {
        Source::Stdout => Output::Stdout(bytes),
        Source::Stderr => Output::Stderr(bytes),
        Source::Terminal => Output::Pty(bytes),
    };
    event(DataEvent { output: Some(output), ..Default::default() })
}

fn end_event(exit: Exit) -> EndEvent {
    let (exit_code, exited, status) = match exit {
        Exit::Code(code) => (code, true, format!("exit status {code}")),
        Exit::Signal(signal) => (-1, false, format!("signal: {}", signal_words(signal))),
    };
    let error = (exit != Exit::Code(0)).then(|| status.clone());
    EndEvent { exit_code, exited, status, error, ..Default::default() }
}

/// A signal in the words of the reference daemon, which callers compare with.
fn signal_words(signal: i32) -> String {
    let words = match signal {
        1 => "hangup",
        2 => "interrupt",
        3 => "quit",
        4 => "illegal instruction",
        5 => "trace/breakpoint trap",
        6 => "aborted",
        7 => "bus error",
        8 => "floating point exception",
        9 => "killed",
        10 => "user defined signal 1",
        11 => "segmentation fault",
        12 => "user defined signal 2",
        13 => "broken pipe",
        14 => "alarm clock",
        15 => "terminated",
        other => return format!("signal {other}"),
    };
    words.to_owned()
}

async fn write_input(process: &Running, input: Option<wire::ProcessInput>) -> Result<(), ConnectError> {
    use oneof::process_input::Input;

    let written = match input.and_then(|input| input.input) {
        Some(Input::Stdin(bytes)) => process.write_stdin(&bytes).await,
        Some(Input::Pty(bytes)) => process.write_terminal(&bytes).await,
        None => return Err(ConnectError::unimplemented("invalid input type")),
    };
    written.map_err(input_error)
}

fn input_error(error: InputError) -> ConnectError {
    match error {
        InputError::CloseTerminal(_) => ConnectError::unknown(error.to_string()),
        _ => ConnectError::internal(error.to_string()),
    }
}

fn read_selector(selector: Option<&wire::ProcessSelector>) -> Result<Selector, ConnectError> {
    use oneof::process_selector::Selector as Wire;

    match selector.and_then(|selector| selector.selector.as_ref()) {
        Some(Wire::Pid(pid)) => Ok(Selector::Pid(*pid)),
        Some(Wire::Tag(tag)) => Ok(Selector::Tag(tag.clone())),
        None => Err(ConnectError::unimplemented("invalid process selector: neither pid nor tag")),
    }
}

fn not_found(selector: &Selector) -> ConnectError {
    ConnectError::not_found(match selector {
        Selector::Pid(pid) => format!("process with pid {pid} not found"),
        Selector::Tag(tag) => format!("process with tag {tag} not found"),
    })
}

fn read_size(size: &wire::pty::Size) -> TerminalSize {
    let clamp = |n: u32| u16::try_from(n).unwrap_or(u16::MAX);
    TerminalSize { columns: clamp(size.cols), rows: clamp(size.rows) }
}

/// The number in a header, if there is one.
fn number(context: &RequestContext, name: &str) -> Result<Option<u64>, ConnectError> {
    let Some(value) = context.header(name) else { return Ok(None) };
    match value.to_str().ok().and_then(|text| text.parse::<u64>().ok()) {
        Some(number) => Ok(Some(number)),
        None => Err(ConnectError::invalid_argument(format!("invalid {name} header: {value:?}"))),
    }
}

fn describe(process: &Running) -> wire::ProcessInfo {
    let config = &process.config;
    wire::ProcessInfo {
        config: wire::ProcessConfig {
            cmd: config.command.clone(),
            args: config.arguments.clone(),
            envs: config.environment.clone().into_iter().collect(),
            cwd: config.directory.clone(),
            ..Default::default()
        }
        .into(),
        pid: process.pid.cast_unsigned(),
        tag: config.tag.clone(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_event_says_exactly_how_it_ended() {
        let ok = end_event(Exit::Code(0));
        assert_eq!((ok.exit_code, ok.exited, ok.status.as_str(), ok.error), (0, true, "exit status 0", None));
        let failed = end_event(Exit::Code(3));
        assert_eq!((failed.exit_code, failed.exited, failed.error.as_deref()), (3, true, Some("exit status 3")));
        let killed = end_event(Exit::Signal(9));
        assert_eq!((killed.exit_code, killed.exited, killed.error.as_deref()), (-1, false, Some("signal: killed")));
    }
}
