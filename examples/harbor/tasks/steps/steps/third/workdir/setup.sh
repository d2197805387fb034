echo pear > given.txt
