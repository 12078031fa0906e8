mod flawed;
mod late;
mod pace;
mod read;
mod real;
mod table;
mod unchanged;
