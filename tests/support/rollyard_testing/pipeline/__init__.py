"""What tests of stage workers share."""
