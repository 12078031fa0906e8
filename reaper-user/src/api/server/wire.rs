//! Stream of a connection, on which responses to invalid HTTP have a body too.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use super::{HEADERS_MAX, route};
use crate::api::StatusCode;

/// Stream that drops what hyper writes before it has read a request: its response to invalid HTTP, which has no body.
pub(super) struct Wire {
    stream: TokioIo<UnixStream>,
    has_request: Rc<Cell<bool>>,
}

impl Wire {
    /// Creates the stream. `has_request` becomes true when a request has been read.
    pub(super) fn new(stream: UnixStream, has_request: Rc<Cell<bool>>) -> Wire {
        let stream = TokioIo::new(stream);
        Wire {
            stream,
            has_request,
        }
    }

    /// Sends the response to a connection without a valid request. Sends none if the client has disconnected.
    pub(super) fn refuse(self, error: &hyper::Error) {
        let (status, what) = if error.is_timeout() {
            let what =
                "the headers of the request did not arrive in time; end them with an empty line";
            (StatusCode::REQUEST_TIMEOUT, what.into())
        } else if error.is_parse_too_large() {
            let what = format!(
                "the request has more than {HEADERS_MAX} bytes before its body; send fewer"
            );
            (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, what)
        } else if error.is_parse() || error.is_incomplete_message() {
            let what = format!("this is no request of HTTP/1.1: {error}");
            (StatusCode::BAD_REQUEST, what)
        } else {
            return;
        };
        // Dropped if the socket's buffer has no room for it.
        drop(self.stream.inner().try_write(&route::unread(status, what)));
    }

    fn stream(&mut self) -> Pin<&mut TokioIo<UnixStream>> {
        Pin::new(&mut self.stream)
    }
}

impl Read for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream().poll_read(context, buffer)
    }
}

impl Write for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.has_request.get() {
            true => self.stream().poll_write(context, bytes),
            false => Poll::Ready(Ok(bytes.len())),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.has_request.get() {
            true => self.stream().poll_write_vectored(context, slices),
            false => Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum())),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.has_request.get() {
            true => self.stream().poll_shutdown(context),
            false => Poll::Ready(Ok(())),
        }
    }
}
