//! A channel's connections: closed in forked children, and counted.
//!
//! A call that is made in the moment in which its connection ends can be forgotten by the HTTP/2 client: what hands it to
//! the connection's task is let go of with the call in it, and who made it waits for good (seen with hyper 1.12, about
//! once in 2,000 calls to a program that closes at once). So a call for which no connection has been there for a while
//! is given up here.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use podring_fork::Marked;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::Status;

/// So long a call waits with no connection open or being made. A channel that is to connect anew begins at once, so this
/// is for a machine that stood still.
const SETTLED: Duration = Duration::from_secs(1);

/// The connections of one channel.
#[derive(Clone, Default)]
pub(super) struct Sockets(Arc<watch::Sender<usize>>);

impl Sockets {
    /// Counts one from now on, which is being made.
    pub(super) fn begin(&self) -> Begun {
        self.0.send_modify(|count| *count += 1);
        Begun(Arc::clone(&self.0))
    }

    /// Whether none is open or being made.
    pub(super) fn none(&self) -> bool {
        *self.0.borrow() == 0
    }

    /// Waits for a call's answer. That nothing will be heard of it any more is told as the client tells of a connection
    /// that closes under a call.
    pub(super) async fn answer<T>(&self, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        tokio::select! {
            biased;
            answer = call => answer,
            () = self.settled() => Err(Status::unavailable("connection closed as the call was made")),
        }
    }

    async fn settled(&self) {
        let mut count = self.0.subscribe();
        loop {
            // Neither fails: the sender is borrowed meanwhile.
            let _ = count.wait_for(|count| *count == 0).await;
            if timeout(SETTLED, count.wait_for(|count| *count > 0)).await.is_err() {
                return;
            }
        }
    }
}

/// One that is counted until this is dropped.
pub(super) struct Begun(Arc<watch::Sender<usize>>);

impl Begun {
    /// It is there.
    pub(super) fn carry(self, stream: TcpStream) -> Socket {
        Socket { _mark: Marked::new(&stream), stream, _begun: self }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// A connection that forked children close.
pub(super) struct Socket {
    /// Before the stream, which closes the descriptor.
    _mark: Marked,
    stream: TcpStream,
    _begun: Begun,
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
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

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use podring_proto::rendezvous_client::RendezvousClient;
    use tokio::time::{Instant, sleep};
    use tonic::{Code, Response};

    use super::super::connect::{Connection, Credentials};
    use super::super::error::Error;
    use super::*;

    /// What becomes of a call that nobody answers, within ten times the pause.
    async fn forgotten(sockets: &Sockets) -> Option<Code> {
        let call = sockets.answer(pending::<Result<(), Status>>());
        timeout(SETTLED * 10, call).await.ok().map(|answer| answer.unwrap_err().code())
    }

    fn paused<F: Future>(body: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(body)
    }

    #[test]
    fn a_call_outlives_its_last_connection_for_a_while() {
        paused(async {
            let sockets = Sockets::default();
            let (first, second) = (sockets.begin(), sockets.begin());
            assert_eq!(forgotten(&sockets).await, None);
            drop(first);
            assert_eq!(forgotten(&sockets).await, None);
            drop(second);
            assert!(sockets.none());
            let began = Instant::now();
            assert_eq!(forgotten(&sockets).await, Some(Code::Unavailable));
            assert!(began.elapsed() < SETTLED * 2);
        });
    }

    #[test]
    fn a_connection_made_anew_keeps_it() {
        paused(async {
            let sockets = Sockets::default();
            drop(sockets.begin());
            let anew = async {
                sleep(SETTLED / 2).await;
                sockets.begin()
            };
            let (answer, begun) = tokio::join!(forgotten(&sockets), anew);
            assert_eq!(answer, None);
            assert!(!sockets.none());
            drop(begun);
            assert_eq!(forgotten(&sockets).await, Some(Code::Unavailable));
        });
    }

    #[test]
    fn a_forgotten_call_ends_as_one_whose_coordinator_is_lost() {
        paused(async {
            let channel = tonic::transport::Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
            let client = RendezvousClient::with_interceptor(channel, Credentials::default());
            let (sockets, silence) = (Sockets::default(), Duration::from_secs(10));
            let connection = Connection { client, sockets, endpoint: "host:1".into(), instance: 1, silence };
            let answer = connection.call("barrier", SETTLED * 10, |_| pending::<Result<Response<()>, Status>>()).await;
            assert!(matches!(&answer, Err(Error::CoordinatorLost { how, .. }) if how.contains("closed")), "{answer:?}");
        });
    }

    #[test]
    fn an_answer_counts_without_a_connection() {
        paused(async { assert_eq!(Sockets::default().answer(ready(Ok(7))).await.unwrap(), 7) });
    }
}
