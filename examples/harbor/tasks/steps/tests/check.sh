# Helpers that the tests of all steps share.
has_words() {
    [ "$(cat /work/words.txt 2> /dev/null)" = "$1" ]
}
