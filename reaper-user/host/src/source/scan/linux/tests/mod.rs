mod interval;
mod malformed;
mod read;
mod real;
mod table;
mod unchanged;
mod unread;
