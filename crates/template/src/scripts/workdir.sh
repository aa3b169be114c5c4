# PATH USER
make_dir "$1" "$(owner_of "$2")"
