//! Connections as the coordinator accepts them: counted, given up when silent, closed when it stops.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use podring_fork::Marked;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::futures::OwnedNotified;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, Sleep};
use tonic::transport::server::Connected;

use super::stream::Caller;
use crate::frame::MAGIC;
use crate::seldom::Seldom;

/// A switch that many can wait for, used once.
#[derive(Clone, Default)]
pub(crate) struct Stop(Arc<(AtomicBool, Arc<Notify>)>);

impl Stop {
    pub(crate) fn set(&self) {
        self.0.0.store(true, Ordering::SeqCst);
        self.0.1.notify_waiters();
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.0.load(Ordering::SeqCst)
    }

    fn listen(&self) -> Pin<Box<OwnedNotified>> {
        // Counts for what is set from now on; the caller looks at the flag afterwards.
        Box::pin(Arc::clone(&self.0.1).notified_owned())
    }

    pub(crate) async fn wait(&self) {
        let notified = self.listen();
        if !self.is_set() {
            notified.await;
        }
    }
}

/// An accepted connection.
pub(crate) struct Guarded {
    /// Before the stream, which closes the descriptor.
    _mark: Marked,
    stream: TcpStream,
    _permit: OwnedSemaphorePermit,
    stop: Stop,
    stopped: Pin<Box<OwnedNotified>>,
    /// Longest pause between two reads. Healthy peers answer the server's pings more often.
    idle: Duration,
    read_at: Instant,
    alarm: Pin<Box<Sleep>>,
}

impl Guarded {
    fn new(stream: TcpStream, permit: OwnedSemaphorePermit, stop: &Stop, idle: Duration) -> Self {
        let (stopped, now) = (stop.listen(), Instant::now());
        let alarm = Box::pin(tokio::time::sleep_until(now + idle));
        Guarded {
            _mark: Marked::new(&stream),
            stream,
            _permit: permit,
            stop: stop.clone(),
            stopped,
            idle,
            read_at: now,
            alarm,
        }
    }
}

impl AsyncRead for Guarded {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.stop.is_set() || this.stopped.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        if let Poll::Ready(result) = Pin::new(&mut this.stream).poll_read(cx, buf) {
            this.read_at = Instant::now();
            return Poll::Ready(result);
        }
        // The alarm is set anew only when it goes off: reads are many, silences few.
        while this.alarm.as_mut().poll(cx).is_ready() {
            let due = this.read_at + this.idle;
            if due <= Instant::now() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            this.alarm.as_mut().reset(due);
        }
        Poll::Pending
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl Connected for Guarded {
    type ConnectInfo = Option<SocketAddr>;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.peer_addr().ok()
    }
}

/// Where connections go.
#[derive(Clone)]
pub(crate) struct Doors {
    pub(crate) stop: Stop,
    pub(crate) idle: Duration,
    /// gRPC.
    pub(crate) calls: mpsc::Sender<io::Result<Guarded>>,
    /// Store streams, where there is no TLS.
    pub(crate) streams: Option<mpsc::UnboundedSender<Caller>>,
}

impl Doors {
    /// Sends a connection on by its first byte.
    async fn admit(self, stream: TcpStream, seat: OwnedSemaphorePermit) {
        let guarded = |stream, seat| Ok(Guarded::new(stream, seat, &self.stop, self.idle));
        let Some(streams) = &self.streams else {
            let _ = self.calls.send(guarded(stream, seat)).await;
            return;
        };
        let mark = Marked::new(&stream);
        let mut first = [0];
        let first = tokio::select! {
            // One that says nothing is given up.
            peeked = tokio::time::timeout(self.idle, stream.peek(&mut first)) => match peeked {
                Ok(Ok(1)) => first[0],
                _ => return,
            },
            () = self.stop.wait() => return,
        };
        drop(mark);
        if first != MAGIC[0] {
            let _ = self.calls.send(guarded(stream, seat)).await;
        } else if let Ok(stream) = stream.into_std() {
            let _ = streams.send(Caller { stream, seat });
        }
    }
}

/// Accepts until stopped. Out of descriptors is a pause, not an end.
pub(crate) async fn accept((_mark, listener): (Marked, TcpListener), seats: Arc<Semaphore>, doors: Doors) {
    let mut refusals = Seldom::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = doors.stop.wait() => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                let Ok(permit) = Arc::clone(&seats).try_acquire_owned() else {
                    if refusals.may(Instant::now().into_std()) {
                        tracing::warn!(%peer, "refusing connections: as many as may be are open");
                    }
                    continue;
                };
                let _ = stream.set_nodelay(true);
                tokio::spawn(doors.clone().admit(stream, permit));
            }
            Err(error) => {
                if refusals.may(Instant::now().into_std()) {
                    tracing::warn!(%error, "a connection can't be accepted");
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}
