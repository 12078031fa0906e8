mod flawed;
mod pace;
mod read;
mod real;
mod table;
mod unchanged;
